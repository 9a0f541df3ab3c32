"""What capture tells of calls that reach a real server: turns and tags agree."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from langchain_art import CaptureHandler, ChatART, Turn, capture
from tests.support.graphs import ASK, RETRY, Flaky, graph_of, node


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


async def test_turns_and_tags_agree_asynchronously(art_server: Any, model: ChatART) -> None:
    async def say(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def stream(state: MessagesState) -> Any:
        chunks = [chunk async for chunk in model.astream(state["messages"])]
        return {"messages": [sum(chunks[1:], chunks[0])]}

    graph = graph_of(say=say, stream=stream).compile()
    async with capture() as run:
        await graph.ainvoke(ASK)
        [part async for part in graph.astream(ASK, stream_mode="messages")]
    check(art_server, run, of=4)


class Wrapper(BaseChatModel):
    """Asks another chat model by `invoke`."""

    inner: ChatART

    @property
    def _llm_type(self) -> str:
        return "wrapper"

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.inner.invoke(messages))])


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


def test_a_models_own_handler_is_heard_in_raw_threads(art_server: Any, model: ChatART) -> None:
    handler = CaptureHandler()
    own = model.model_copy(update={"callbacks": [handler]})
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda word: own.invoke(word), "ab"))
        list(pool.map(lambda word: list(own.stream(word)), "cd"))
        untold = pool.submit(model.invoke, "e").result()
    check(art_server, handler.run, of=4)
    turn = Turn(call_id=untold.response_metadata["call_id"])
    assert not tags_of(art_server, turn).get("trajectory_id")


def test_the_innermost_scope_tags(art_server: Any, model: ChatART) -> None:
    with capture() as outer:
        with capture() as inner:
            graph_of(a=node(model)).compile().invoke(ASK)
        graph_of(a=node(model)).compile().invoke(ASK)
    assert tags_of(art_server, outer.turns[0])["trajectory_id"] == inner.id
    assert tags_of(art_server, outer.turns[1])["trajectory_id"] == outer.id
    assert outer.turns[0].call_id == inner.turns[0].call_id


def test_a_stream_closed_early_keeps_its_call_id(art_server: Any, model: ChatART) -> None:
    with capture() as run:
        stream = model.stream("hi")
        next(stream)
        stream.close()
    assert run.turns[0].call_id is not None
    assert run.turns[0].excluded_because == "error"
