"""The next one is of the client that has least; clients that have as much take turns."""

import asyncio
from collections import defaultdict

import pytest

from langchain_art_server.backends.chat.fair_queue import FairQueue, FairSlots


def test_what_is_put_back_is_next_and_what_is_unwanted_is_dropped() -> None:
    queue: FairQueue[str] = FairQueue()
    for one in ("a0", "a1", "a2", "b0", "b1", "c0", "c1"):
        queue.put(one[0], one)
    assert queue.take({}) == "a0"
    queue.put_back("a", "a0")
    assert [queue.take({}) for _ in range(2)] == ["a0", "b0"]
    assert queue.take({}, {"b", "d"}) == "b1"
    assert queue.take({}, {"b", "d"}) is None, "only some clients are asked for"
    dropped = queue.drop(lambda one: one in {"a1", "c0", "c1"})
    assert sorted(dropped) == ["a1", "c0", "c1"]
    assert queue.clients == {"a"} and queue.take({}) == "a2" and queue.take({}) is None


async def holders(slots: FairSlots, steps: list[str]) -> list[str]:
    """Who holds a slot after each step, in which calls begin (+), end (-) or are cancelled (x)."""
    running: list[str] = []
    tasks: dict[str, asyncio.Task[None]] = {}
    go = defaultdict[str, asyncio.Event](asyncio.Event)

    async def run(name: str) -> None:
        async with slots.one(name[0]):
            running.append(name)
            try:
                await go[name].wait()
            finally:
                running.remove(name)

    seen: list[str] = []
    for step in steps:
        for name in step[1:].split():
            if step[0] == "+":
                tasks[name] = asyncio.create_task(run(name))
            elif step[0] == "-":
                go[name].set()
            else:
                tasks[name].cancel()
            for _ in range(6):
                await asyncio.sleep(0)
        seen.append(" ".join(running))
    return seen


@pytest.mark.parametrize(
    ("slots", "kept", "steps", "held"),
    [
        (2, 0, ["+a1 a2 a3 a4 b1", "-a1", "-b1"], ["a1 a2", "a2 b1", "a2 a3"]),
        (2, 1, ["+a1 a2 a3 b1 b2", "-b1"], ["a1 a2 b1", "a1 a2 b2"]),
        (1, 0, ["+a1 b1 c1", "xb1", "-a1"], ["a1", "a1", "c1"]),
        (1, 0, ["+a1 b1 c1", "xa1"], ["a1", "b1"]),
    ],
    ids=["fewest first", "kept for others", "a cancelled one that waits", "one that holds"],
)
async def test_a_free_slot_goes_to_the_client_that_has_fewest(
    slots: int, kept: int, steps: list[str], held: list[str]
) -> None:
    assert await holders(FairSlots(slots, kept=kept), steps) == held
