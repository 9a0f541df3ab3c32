"""What a call is tagged with: its place, the user's tags; without a capture, its trajectory."""

from typing import Any
from uuid import uuid4

import pytest
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from langchain_art import ChatART, capture
from langchain_art.call_tags import tags_from_metadata
from langchain_art.client.sync_client import ArtClient
from langchain_art.wire import CallTags
from tests.support.graphs import ASK, graph_of
from tests.support.live_server import LiveServer


@pytest.fixture
def model(art_server: LiveServer) -> ChatART:
    return ChatART(model=art_server.policy, base_url=art_server.base_url, max_tokens=4)


def test_the_users_tags_and_a_nodes_count_and_fit_the_wire() -> None:
    told = ["seq:step:1", "mine", "map:key:k", "graph:step:3", "retry:attempt:2", "theirs"]
    told += ["langsmith:hidden", "langsmith:nostream", "nostream", "mine", "seq", "nostreams", ""]
    assert tags_from_metadata({}, tags=told)["tags"] == ["mine", "theirs", "seq", "nostreams"]
    assert "tags" not in tags_from_metadata({}, tags=["seq:step:1"])
    for node in ("main", ["main", "mine"]):
        assert tags_from_metadata({"art_tags": node}, tags=["mine"])["tags"] == ["mine", "main"]
    where = tags_from_metadata({"art_tags": ["x" * 300]}, tags=[str(i) for i in range(40)])
    assert len(where["tags"]) == len(CallTags(**where).tags) == 32
    assert CallTags(**tags_from_metadata({"art_tags": "x" * 300})).tags == ("x" * 256,)


async def test_without_a_capture_the_config_names_the_trajectory(
    model: ChatART, client: ArtClient
) -> None:
    def node(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    async def anode(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def streams(state: Any) -> Any:
        chunks = list(model.stream(state["messages"]))
        return {"messages": [sum(chunks[1:], chunks[0])]}

    chain = RunnableLambda(lambda state: state["messages"]) | model
    both = {"a": node, "b": chain | (lambda reply: {"messages": [reply]}), "c": streams}
    run = f"run-{uuid4().hex}"
    metadata = {"art_trajectory_id": run, "art_scenario": "q"}
    config: Any = {"metadata": metadata, "tags": ["mine"]}
    graph_of(**both).compile().invoke(ASK, config)
    await graph_of(**both, d=anode).compile().ainvoke(ASK, config)
    trajectory = client.reward(run, 1.0)
    assert trajectory.scenario == "q"
    assert [turn.node for turn in trajectory.turns] == [*"abc", *"abcd"]
    for turn in trajectory.turns:
        assert (turn.path, turn.tags) == ((turn.node,), ("mine",))
        assert turn.step == "abcd".index(turn.node or "") + 1
        assert turn.namespace and turn.namespace.startswith(f"{turn.node}:")


def test_a_capture_outdoes_the_metadata(model: ChatART, client: ArtClient) -> None:
    with capture(scenario="ours") as run:
        reply = model.invoke("hi", {"metadata": {"art_trajectory_id": "theirs"}})
    tags = client.call(reply.response_metadata["call_id"])["tags"]
    assert (tags["trajectory_id"], tags["scenario"]) == (run.id, "ours")


def test_tags_do_not_outlive_their_call(model: ChatART, client: ArtClient) -> None:
    model.invoke("hi", {"metadata": {"art_trajectory_id": "first"}})
    untagged = model.model_copy(update={"callbacks": None})
    for reply in (untagged.invoke("hi"), model.invoke("hi")):
        assert not client.call(reply.response_metadata["call_id"])["tags"].get("trajectory_id")


def test_what_the_graph_threw_away_does_not_count_without_a_capture(
    model: ChatART, client: ArtClient
) -> None:
    """As a graph in another process makes its calls: a node asks a person, a chain tries again."""
    tries = iter([False, True] * 4)

    def parse(reply: Any) -> Any:
        if not next(tries):
            raise ValueError("not good enough")
        return reply

    def asks(state: Any) -> Any:
        first = model.invoke("Plan.")
        interrupt("Shall I?")
        return {"messages": [model.invoke([*state["messages"], first, ("user", "Go on.")])]}

    def retries(state: Any) -> Any:
        chain = (model | parse).with_retry(wait_exponential_jitter=False)
        return {"messages": [chain.invoke("Answer.")]}

    agent = graph_of(asks=asks, retries=retries).compile(checkpointer=InMemorySaver())

    def play(metadata: dict[str, str]) -> None:
        config: Any = {"metadata": metadata, "configurable": {"thread_id": uuid4().hex}}
        agent.invoke(ASK, config)
        agent.invoke(Command(resume="yes"), config)

    name = uuid4().hex
    play({"art_trajectory_id": name})
    assembled = client.reward(name, 1.0)
    with capture() as run:
        play({})
    expected = [("asks", False), ("asks", True), ("asks", True), ("retries", False)]
    expected += [("retries", True)]
    for turns in (assembled.turns, run.turns):
        assert [(turn.node, turn.excluded_because is None) for turn in turns] == expected
