"""A graph whose router answers by structured output learns where to send its questions."""

from pathlib import Path
from typing import Any, Literal

import pytest
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel
from typing_extensions import TypedDict

from examples.support.mail_words import EVENTS, PROJECTS
from langchain_art import ArtClient, ChatART, LRSchedule, TrainConfig, capture
from langchain_art.tracing.run import Run
from langchain_art.wire import LoraConfig
from tests.support.chat_models import model_of
from tests.support.live_server import BASE_MODEL, ForkedServer
from tests.support.soak import count, share
from tests.support.tiny_models import WORST
from tests.support.trainers import trainer_of

STEPS = count(1, 12)


class Route(BaseModel):
    """Who answers the question."""

    to: Literal["calendar", "people"]


class State(TypedDict, total=False):
    question: str
    route: Route
    answer: str


def graph_of(model: ChatART) -> Any:
    """A router, and two nodes that each know the answers to questions of one kind."""
    router = model.with_structured_output(Route)

    async def route(state: State) -> State:
        return {"route": await router.ainvoke(f"{state['question']} calendar or people?")}  # type: ignore[typeddict-item]

    def calendar(state: State) -> State:
        return {"answer": "June 7" if state["question"].startswith("When") else "no idea"}

    def people(state: State) -> State:
        return {"answer": "Ann" if state["question"].startswith("Who") else "no idea"}

    built = StateGraph(State)
    built.add_node("router", route)
    built.add_node("calendar", calendar)
    built.add_node("people", people)
    built.add_edge(START, "router")
    built.add_conditional_edges("router", lambda state: state["route"].to)
    built.add_edge("calendar", END)
    built.add_edge("people", END)
    return built.compile()


def questions(projects: list[str]) -> list[str]:
    return [
        f"{word} {event} of {project}?"
        for project in projects
        for event in EVENTS
        for word in ("When is the", "Who comes to the")
    ]


@pytest.mark.soak("D2", STEPS, "steps of a router with structured output")
@pytest.mark.slow
async def test_a_router_with_structured_output_learns_to_route(tmp_path: Path) -> None:
    """On the demo's whole model: the first layer alone does not tell the questions apart.

    In ``make test`` a step trains the router's calls; they are better after several steps.
    """
    runs: list[Run] = []

    async def rollout(question: str) -> Run:
        async with capture(scenario=question) as run:
            state = await graph.ainvoke({"question": question})
            run.reward = float(state["answer"] != "no idea")
        runs.append(run)
        return run

    # Without the warm-up a fit came now and then to send all questions one way, for good.
    schedule = LRSchedule(warmup_steps=4)
    config = TrainConfig(learning_rate=1e-3, schedule=schedule, advantage="standardized")
    options = {
        "group_size": 8,
        "groups_per_step": count(4, 16),
        "lora": LoraConfig(rank=8, alpha=16.0),
    }
    held_out = questions(sorted(PROJECTS)[:4])[: count(2, 96)]
    with ForkedServer(tmp_path / "data", model=BASE_MODEL) as server:
        graph = graph_of(model_of(server, "router", max_tokens=24))
        trainer = trainer_of(server, tmp_path / "fit", "router", config=config, **options)
        found = await trainer.fit(
            rollout, questions(sorted(PROJECTS)[4:]), steps=STEPS, eval_scenarios=held_out
        )
        with ArtClient(server.base_url) as client:
            audits = (client.audit(run.id) for run in runs)
            [turn] = next(audit for audit in audits if "router" in audit.trained_by).turns
    assert found.before is not None and found.after is not None
    for step in found.history:
        assert set(step.excluded) <= {"groups.zero_variance"}
        assert step.metrics.get("logprob_gap_max", 0.0) <= WORST
    if share() == 1:
        assert found.before.mean < 0.6 and found.after.mean > 0.9
        print(f"{found.before} → {found.after}")  # noqa: T201
    assert found.version > 0 and found.history[0].nodes["router"].calls >= 8
    assert (turn.node, turn.excluded_because) == ("router", None)
    assert turn.trained_tokens == turn.sampled_tokens > 0
