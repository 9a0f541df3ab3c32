"""The next one is of the client that has least; clients that have as much take turns."""

import asyncio

import pytest

from langchain_art_server.backends.chat.fair_queue import FairQueue, FairSlots


def queue_of(**counts: int) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for client, count in counts.items():
        for number in range(count):
            queue.put(client, f"{client}{number}")
    return queue


def test_what_is_put_back_is_next_and_what_is_unwanted_is_dropped() -> None:
    queue = queue_of(a=3, b=2, c=2)
    assert queue.take({}) == "a0"
    queue.put_back("a", "a0")
    assert [queue.take({}) for _ in range(2)] == ["a0", "b0"]
    assert queue.take({}, {"b", "d"}) == "b1"
    assert queue.take({}, {"b", "d"}) is None, "only some clients are asked for"
    dropped = queue.drop(lambda one: one in {"a1", "c0", "c1"})
    assert sorted(dropped) == ["a1", "c0", "c1"]
    assert queue.clients == {"a"} and queue.take({}) == "a2"


class Calls:
    """Calls that hold a slot until they are let go."""

    def __init__(self, slots: FairSlots) -> None:
        self._slots = slots
        self.running: list[str] = []
        self._go: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        for name in names:
            self._go[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._run(name))
            await asyncio.sleep(0)
        await self.settle()

    async def end(self, name: str) -> None:
        self._go[name].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _run(self, name: str) -> None:
        async with self._slots.one(name[0]):
            self.running.append(name)
            await self._go[name].wait()
            self.running.remove(name)


async def test_a_free_slot_goes_to_the_client_that_has_fewest() -> None:
    calls = Calls(FairSlots(2))
    await calls.begin("a1", "a2", "a3", "a4", "b1")
    assert calls.running == ["a1", "a2"]
    await calls.end("a1")
    assert calls.running == ["a2", "b1"]
    await calls.end("b1")
    assert calls.running == ["a2", "a3"]


async def test_slots_are_kept_for_other_clients_than_one_that_has_all() -> None:
    calls = Calls(FairSlots(2, kept=1))
    await calls.begin("a1", "a2", "a3", "b1", "b2")
    assert calls.running == ["a1", "a2", "b1"]
    await calls.end("b1")
    assert calls.running == ["a1", "a2", "b2"]


@pytest.mark.parametrize("waits", [True, False])
async def test_a_call_that_is_cancelled_leaves_its_place(waits: bool) -> None:
    calls = Calls(FairSlots(1))
    await calls.begin("a1", "b1", "c1")
    calls.tasks["b1" if waits else "a1"].cancel()
    await calls.settle()
    if waits:
        assert calls.running == ["a1"]
        await calls.end("a1")
    assert calls.running[-1] == ("c1" if waits else "b1")
