"""Which failed runs are repeated: those that failed by a call that our server did not serve.

Random programs fail in every way that a rollout can, and handle what fails inside of them. A slow
oracle follows a program by hand, with no exception, and says whose failure ends it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import httpx
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph

from langchain_art import AsyncArtClient, ChatART, capture
from langchain_art.rollout.gather import gather_from
from langchain_art.rollout.runner import RolloutWorker
from langchain_art.tracing.run import Run
from tests.support.raw_server import Answer, RawServer, refusal
from tests.support.soak import count

GONE = "http://127.0.0.1:9/v1"  # nothing listens there

Whose = Literal["nobody's", "ours", "its own"]
Leaf: TypeAlias = "tuple[Whose, Callable[[], Awaitable[object]]]"


class Always(list[Answer]):
    """The same answer to every request."""

    def pop(self, *_: object) -> Answer:
        return self[0]


def cut(send: Callable[[bytes], None]) -> bool:
    """Half a stream."""
    send(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return False


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Leaf]]:
    """What a program does: whose failure it is, and how to do it."""

    def at(server: RawServer, kind: type[ChatOpenAI] | type[ChatART] = ChatART) -> Any:
        known = {"api_key": "k", "max_retries": 0}
        return kind(model="m", base_url=server.base_url, **known)  # type: ignore[arg-type]

    async def streamed() -> None:
        async for _ in cutting.astream("hi"):
            pass

    async def unreachable() -> None:
        async with AsyncArtClient(GONE, patience=0) as client:
            await client.policies()

    async def fetched() -> None:
        async with httpx.AsyncClient() as client:
            await client.get(GONE)

    async def raised(error: Exception) -> None:
        raise error

    with ExitStack() as stack:
        found = [stack.enter_context(RawServer()) for _ in range(6)]
        good, refusing, dropping, cuts, wrong, foreign = found
        refusing.answers, dropping.answers = Always([refusal(503)]), Always([None])
        cuts.answers, wrong.answers = Always([cut]), Always([refusal(400)])
        foreign.answers = Always([refusal(429)])
        cutting = at(cuts)
        monkeypatch.setenv("ART_BASE_URL", refusing.base_url)
        models = {
            "ours, served": ("nobody's", at(good)),
            "ours, refused": ("ours", at(refusing)),
            "ours, dropped": ("ours", at(dropping)),
            "ours, by another client": ("ours", at(refusing, ChatOpenAI)),
            "ours, a wrong request": ("its own", at(wrong)),
            "a foreign model, refused": ("its own", at(foreign, ChatOpenAI)),
            "a foreign model, dropped": ("its own", at(dropping, ChatOpenAI)),
        }
        yield {
            **{
                name: (whose, lambda one=one: one.ainvoke("hi"))
                for name, (whose, one) in models.items()
            },
            "ours, a stream cut off": ("ours", streamed),
            "ours, by the client": ("ours", unreachable),
            "a tool's request": ("its own", fetched),
            "a tool's time limit": ("its own", lambda: raised(httpx.ReadTimeout("slow"))),
            "a tool's error": ("its own", lambda: raised(ValueError("broken"))),
        }


@dataclass(frozen=True)
class Program:
    """A leaf, or something around other programs."""

    kind: str
    parts: tuple[Program, ...] = ()


AROUND = ("in a node", "in a tool", "wrapped from", "wrapped from None", "raised while handled")
HANDLED = ("handled", "raised on", "handled, and then")


def drawn(rng: random.Random, leaves: list[str], depth: int = 3) -> Program:
    if depth == 0 or rng.random() < 0.25:
        return Program(rng.choice(leaves))
    kind = rng.choice([*AROUND, *HANDLED, "one after the other", "branches"])
    several = kind in ("one after the other", "branches", "handled, and then")
    return Program(kind, tuple(drawn(rng, leaves, depth - 1) for _ in range(1 + several)))


def oracle(program: Program, leaves: dict[str, Leaf]) -> Whose:
    """Whose failure leaves the program."""
    if program.kind in leaves:
        return leaves[program.kind][0]
    found = [oracle(part, leaves) for part in program.parts]
    failed = [one for one in found if one != "nobody's"]
    match program.kind:
        case "handled":
            return "nobody's"
        case "wrapped from None" | "raised while handled":
            return "its own" if failed else "nobody's"
        case "handled, and then":
            return found[1] if found[0] != "nobody's" else "nobody's"
        case "branches":
            return "ours" if "ours" in failed else failed[0] if failed else "nobody's"
        case _:
            return failed[0] if failed else "nobody's"


async def perform(program: Program, leaves: dict[str, Leaf]) -> None:
    if program.kind in leaves:
        await leaves[program.kind][1]()
        return

    async def first(*_: Any) -> dict[str, Any]:
        await perform(program.parts[0], leaves)
        return {}

    match program.kind:
        case "in a node":
            graph = StateGraph(dict).add_node("node", first).add_edge(START, "node").compile()
            await graph.ainvoke({})
        case "in a tool":

            @tool
            async def search(words: str) -> str:
                """Search."""
                await first()
                return words

            await search.ainvoke({"words": "x"})
        case "one after the other":
            for part in program.parts:
                await perform(part, leaves)
        case "branches":
            tasks = [perform(part, leaves) for part in program.parts]
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            if failed := [one for one in ended if isinstance(one, Exception)]:
                raise ExceptionGroup("branches", failed)
        case _:
            await handle(program, first, leaves)


async def handle(program: Program, body: Callable[[], Any], leaves: dict[str, Leaf]) -> None:
    try:
        await body()
    except Exception as error:
        match program.kind:
            case "raised on":
                raise
            case "wrapped from":
                raise RuntimeError("it did not work") from error
            case "wrapped from None":
                raise RuntimeError("it did not work") from None
            case "raised while handled":
                {}["message"]
            case "handled, and then":
                await perform(program.parts[1], leaves)


@pytest.mark.soak
async def test_what_is_repeated_is_what_a_slow_oracle_says(leaves: dict[str, Leaf]) -> None:
    programs = [drawn(random.Random(seed), sorted(leaves)) for seed in range(count(100, 20_000))]
    runs = Counter[int]()

    async def rollout(scenario: dict[str, Any]) -> Run:
        runs[scenario["id"]] += 1
        async with capture() as run:
            run.reward = 1.0
            await perform(programs[scenario["id"]], leaves)
        return run

    numbers = [{"id": number} for number in range(len(programs))]
    worker = RolloutWorker(rollout, 100, retries=1, max_failed=1.0)
    found = await gather_from(worker, numbers, group_size=1)
    whose = [oracle(program, leaves) for program in programs]
    assert len(set(whose)) == 3
    for number, (program, one, run) in enumerate(
        zip(programs, whose, found.trajectories, strict=True)
    ):
        assert runs[number] == (2 if one == "ours" else 1), (number, program, run.error)
        if one != "nobody's":
            assert run.status == "failed", (number, program)
        elif "in a node" not in str(program):  # a graph that fails last fails the run
            assert run.status == "completed", (number, program, run.error)
        assert run.reward == 1.0
    assert found.retried == whose.count("ours")
