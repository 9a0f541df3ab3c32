"""What capture tells of calls that reach a real server: turns and tags agree."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from langchain_art import CaptureHandler, ChatART, Turn, capture
from tests.support.graphs import ASK, RETRY, Answering, Flaky, graph_of, node


@pytest.fixture
def model(art_server: Any) -> Iterator[ChatART]:
    yield ChatART(
        model=art_server.policy,
        base_url=art_server.base_url,
        api_key=art_server.api_key or "EMPTY",
        max_tokens=4,
    )


def tags_of(server: Any, turn: Turn) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {server.api_key or 'EMPTY'}"}
    reply = httpx.get(f"{server.base_url}/calls/{turn.call_id}", headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()["tags"]


def check(server: Any, run: Any, *, of: int) -> None:
    """Turn by turn, the server was told what the run knows."""
    assert len(run.turns) == of
    assert len({turn.call_id for turn in run.turns}) == of
    for turn in run.turns:
        tags = tags_of(server, turn)
        assert turn.ours
        assert turn.model is not None
        assert turn.model.startswith(f"{server.policy}@")
        assert turn.usage is not None
        assert tags["trajectory_id"] == run.id
        for name in ("node", "namespace", "step", "thread"):
            assert tags.get(name) == getattr(turn, name)
        assert tags.get("attempt", 1) == turn.attempt
        assert tuple(tags.get("path") or ()) == turn.path


def streaming(model: ChatART) -> Any:
    def node(state: MessagesState) -> Any:
        chunks = list(model.stream(state["messages"]))
        return {"messages": [sum(chunks[1:], chunks[0])]}

    return node


def test_turns_and_tags_agree(art_server: Any, model: ChatART) -> None:
    inner = graph_of(deep=streaming(model)).compile()
    graph = StateGraph(MessagesState).add_node("flaky", Flaky(node(model)), retry_policy=RETRY)
    graph.add_node("sub", inner).add_edge(START, "flaky").add_edge("flaky", "sub")
    agent = graph.compile(checkpointer=InMemorySaver())
    with capture(scenario="q") as run:
        agent.invoke(ASK, {"configurable": {"thread_id": "t"}})
    check(art_server, run, of=4)
    assert [turn.attempt for turn in run.turns] == [1, 2, 3, 1]
    assert [turn.excluded_because for turn in run.turns] == ["retried", "retried", None, None]
    assert run.turns[3].path == ("sub", "deep")
    assert run.turns[3].extends == 2


class Wrapper(Answering):
    """Asks another chat model by `invoke`."""

    inner: ChatART

    def choices(self, messages: Any) -> list[AIMessage]:
        return [self.inner.invoke(messages)]


def test_a_model_around_ours_makes_no_call_of_its_own(art_server: Any, model: ChatART) -> None:
    agent = graph_of(first=node(Wrapper(inner=model)), second=node(Wrapper(inner=model))).compile()
    with capture() as run:
        replies = agent.invoke(ASK)["messages"][1:]
        run.reward_turn(replies[0], 1.0)
    check(art_server, run, of=2)
    assert [turn.reward for turn in run.turns] == [1.0, None]
    assert run.turns[1].extends == 0


def test_a_config_handler_tags_all_paths(art_server: Any, model: ChatART) -> None:
    handler = CaptureHandler()
    config: Any = {"callbacks": [handler]}
    graph_of(a=node(model), b=streaming(model)).compile().invoke(ASK, config)
    model.invoke("x", config)
    list(model.stream("y", config))
    check(art_server, handler.run, of=4)
