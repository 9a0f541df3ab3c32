"""LangChain's HumanInTheLoopMiddleware on the real server: decisions become rewards and pairs."""

import json
import uuid
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from langchain_art import ArtClient, ChatART, capture
from langchain_art.review.decisions import decision_reviews
from langchain_art.wire import Review, TrajectoryGroup
from tests.conformance.suite.scripts import script
from tests.conformance.suite.tools import LOOK, WEIGH, look, weigh
from tests.support.live_server import RuleServer

EDIT = {"type": "edit", "edited_action": {"name": "look", "args": {"what": "window"}}}
REJECT = {"type": "reject", "message": "Too heavy."}
APPROVE = {"type": "approve"}


@pytest.mark.parametrize("mode", ["batched", "per_call"])
def test_what_a_person_decides_is_kept_with_the_calls(rule_server: RuleServer, mode: Any) -> None:
    model = ChatART(model=rule_server.policy, base_url=rule_server.base_url)
    hold = HumanInTheLoopMiddleware({"look": True, "weigh": True}, interrupt_mode=mode)
    saver = InMemorySaver()
    agent: Any = create_agent(model, [look, weigh], middleware=[hold], checkpointer=saver)
    asked: Any = {"messages": [("user", script(LOOK, WEIGH, LOOK, "drop it"))]}
    reviews: list[Review] = []
    with capture(scenario="q-1", id=f"held-{uuid.uuid4().hex}") as run:
        thread = {"configurable": {"thread_id": run.id}}
        state = agent.invoke(asked, thread)
        for decision in (EDIT, REJECT, APPROVE):
            (interrupt,) = state["__interrupt__"]
            resume = {"decisions": [decision]} if mode == "batched" else {interrupt.id: decision}
            reviews += decision_reviews(run, [interrupt], resume, reviewer="ann")
            state = agent.invoke(Command(resume=resume), thread)
        run.reward = 1.0
    assert state["messages"][-1].text == "drop it" and len(run.turns) == 4
    calls = [turn.call_id for turn in run.turns]
    said = [(one.call_id, one.kind, one.value, one.comment) for one in reviews]
    assert said == [
        (calls[0], "correction", None, None),
        (calls[1], "reward", 0.0, "Too heavy."),
        (calls[2], "reward", 1.0, None),
    ]
    with ArtClient(rule_server.base_url) as client:
        client.post_groups([TrajectoryGroup(id=run.id, trajectories=(run.trajectory(),))])
        assert client.put_reviews(reviews).new == 3
        assert client.put_reviews(reviews).unchanged == 3
        plan = client.plan_reviews(rule_server.policy)
    fates = {one.call_id: (one.kind, one.fate) for one in plan.verdicts}
    assert fates[calls[0]] == ("correction", "trains")
    assert fates[calls[1]] == fates[calls[2]] == ("reward", "trains")
    wanted = (reviews[0].correction or {})["tool_calls"][0]["function"]
    assert (wanted["name"], json.loads(wanted["arguments"])) == ("look", {"what": "window"})
