"""Runs that are cut off: what was whole is kept; what was not is neither recorded nor trained."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias
from uuid import uuid4

import httpx
import pytest
from langgraph.graph import MessagesState

from langchain_art import capture
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import NotFound
from langchain_art.tracing.run import Run
from langchain_art.wire import TrajectoryGroup
from tests.conformance.suite import checks
from tests.conformance.suite.harness import Kit
from tests.conformance.suite.nodes import line
from tests.conformance.suite.scripts import script
from tests.conformance.topologies.journal import served_by
from tests.support.live_server import RuleServer

LONG = "word " * 150
"""A reply that takes long enough to be cut off."""

Cut: TypeAlias = "Callable[[Any, Kit, Run, ArtClient], Awaitable[None]]"


async def late_call_runs(run: Run, client: ArtClient) -> None:
    """Returns once the second call is under way."""
    while len(run.turns) < 2 or client.status().running_calls == 0:
        await asyncio.sleep(0.01)


async def cancelled(graph: Any, kit: Kit, run: Run, client: ArtClient) -> None:
    task = asyncio.create_task(graph.ainvoke(kit.ask("e", LONG)))
    await late_call_runs(run, client)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def closed(graph: Any, kit: Kit, run: Run, client: ArtClient) -> None:
    stream = graph.astream(kit.ask("e", LONG), stream_mode="messages")
    async for _, metadata in stream:
        if metadata["langgraph_node"] == "late":
            break
    await stream.aclose()


async def left(graph: Any, kit: Kit, run: Run, client: ArtClient) -> None:
    async for _, metadata in graph.astream(kit.ask("e", LONG), stream_mode="messages"):
        if metadata["langgraph_node"] == "late":
            break
    await asyncio.sleep(0)  # the event loop closes what nobody reads any more


Lines: TypeAlias = "Callable[[], list[dict[str, Any]]]"


@pytest.fixture
def lines(rule_server: RuleServer, client: ArtClient) -> Lines:
    """The engine's lines of a test once nothing runs: those of whole calls are on record."""
    before = len(rule_server.witnessed())

    def idle() -> list[dict[str, Any]]:
        deadline = time.monotonic() + 60
        while client.status().running_calls:
            assert time.monotonic() < deadline, "a call goes on that nobody waits for"
            time.sleep(0.02)
        found = rule_server.witnessed()[before:]
        for seen in found:
            if seen["finish"] is None:  # the engine stopped in its midst
                with pytest.raises(NotFound):
                    client.call(seen["id"])
            else:
                assert client.call(seen["id"])["token_ids"] == seen["token_ids"]
        return found

    return idle


@pytest.mark.parametrize("cut", [cancelled, closed, left])
def test_a_run_that_is_cut_off(
    cut: Cut, rule_server: RuleServer, client: ArtClient, lines: Lines
) -> None:
    kit = Kit(served_by(rule_server), "ainvoke")
    graph = line(MessagesState, early=kit.node(), late=kit.node()).compile()

    async def main() -> list[Run]:
        with capture() as run:
            await cut(graph, kit, run, client)
        with capture() as whole:
            await graph.ainvoke(kit.ask("early", "late"))
        return [run, whole]

    runs = asyncio.run(main())
    seen = lines()
    run = runs[0].trajectory()
    early, late = run.turns
    assert run.status == "failed"
    assert (checks.says(early), early.excluded_because) == ("e", None)
    assert late.excluded_because == "error"
    assert late.error is not None

    scored = [
        run.trajectory().model_copy(update={"reward": float(n)}) for n, run in enumerate(runs)
    ]
    group = TrajectoryGroup(id=uuid4().hex, trajectories=tuple(scored))
    result = client.wait(client.train([group], rule_server.policy, key=uuid4().hex))
    assert Counter(result.excluded) == {"calls.superseded_error": 1}
    kept = {turn.call_id for one in scored for turn in one.turns if turn.excluded_because is None}
    sampled = sum(len(one["token_ids"]) for one in seen if one["id"] in kept)
    assert (len(kept), result.metrics["tokens_trained"]) == (3, sampled)


def test_a_synchronous_stream_closed_early(rule_server: RuleServer, lines: Lines) -> None:
    """LangGraph waits for the node's thread, so the call is whole, and the run says it was left."""
    kit = Kit(served_by(rule_server), "stream")
    graph = line(MessagesState, early=kit.node(), late=kit.node()).compile()
    with capture() as run:
        stream = graph.stream(kit.ask("e", "word " * 40), stream_mode="messages")
        next(metadata for _, metadata in stream if metadata["langgraph_node"] == "late")
        stream.close()
    assert (run.status, run.error) == ("failed", "GeneratorExit: ")
    assert [turn.excluded_because for turn in run.turns] == [None, None]
    assert [turn.call_id for turn in run.turns] == [one["id"] for one in lines()]


def test_a_reply_that_a_node_stops_reading(rule_server: RuleServer, lines: Lines) -> None:
    kit = Kit(served_by(rule_server), "astream")

    async def hasty(state: Any) -> Any:
        stream = kit.model.astream(kit.says(LONG))
        async for chunk in stream:
            if chunk.text:
                break
        await stream.aclose()
        return {"messages": [await kit.model.ainvoke(state["messages"])]}

    with capture() as run:
        asyncio.run(line(MessagesState, hasty=hasty).compile().ainvoke(kit.ask("enough")))
    lines()
    assert run.status == "completed"
    hurried, enough = run.turns
    assert hurried.excluded_because == "error"
    assert hurried.call_id is not None
    assert LONG.startswith(checks.says(hurried))
    assert (checks.says(enough), enough.excluded_because) == ("enough", None)


@pytest.mark.parametrize("asked", [{}, {"n": 2}, {"stream": True}])
def test_a_client_that_leaves_is_not_sampled_for(
    asked: Any, rule_server: RuleServer, client: ArtClient, lines: Lines
) -> None:
    before = len(rule_server.witnessed())
    says = [{"role": "user", "content": script("word " * 3000)}]
    body = {"model": rule_server.policy, "messages": says} | asked

    async def leave() -> None:
        async with httpx.AsyncClient() as http:
            url = f"{rule_server.base_url}/chat/completions"
            call = asyncio.create_task(http.post(url, json=body, timeout=60))
            while client.status().running_calls == 0:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(leave())
    deadline = time.monotonic() + 60
    while len(rule_server.witnessed()) < before + asked.get("n", 1):
        assert time.monotonic() < deadline, "the engine says of a call neither that nor how it ends"
        time.sleep(0.02)
    assert {line["finish"] for line in lines()} == {None}
