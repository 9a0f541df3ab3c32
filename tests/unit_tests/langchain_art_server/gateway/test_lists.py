"""Pages are read in turns: one client's large lists leave time for others."""

import asyncio
from collections.abc import Awaitable, Callable

from langchain_art_server.gateway import lists
from langchain_art_server.gateway.lists import page_turns
from langchain_art_server.storage.queries import Page

PART = lists._READ_PER_SECOND // 20  # 50 ms


async def test_a_client_gets_one_page_at_a_time_and_then_waits_for_its_bytes() -> None:
    turns, clock = page_turns(), asyncio.get_running_loop().time
    began: dict[str, list[float]] = {"a": [], "b": []}
    running = dict.fromkeys(began, 0)

    def read(client: str) -> Callable[[], Awaitable[Page[bytes]]]:
        async def page() -> Page[bytes]:
            began[client].append(clock())
            running[client] += 1
            assert running[client] == 1
            await asyncio.sleep(0.01)
            running[client] -= 1
            return Page([b"x" * PART], None, False)

        return page

    await asyncio.gather(*(turns.take(one, read(one)) for one in "aaabaaa"))
    apart = [later - earlier for earlier, later in zip(began["a"], began["a"][1:], strict=False)]
    assert len(apart) == 5 and min(apart) >= 0.049
    assert began["b"][0] - began["a"][0] < 0.04
    assert not turns._reading


async def test_small_pages_and_failed_ones_take_no_time_of_the_next() -> None:
    turns, clock = page_turns(), asyncio.get_running_loop().time
    begun = clock()

    async def small() -> Page[bytes]:
        return Page([b"x"], None, False)

    async def fails() -> Page[bytes]:
        raise LookupError

    for _ in range(20):
        await turns.take("a", small)
        await asyncio.gather(turns.take("a", fails), return_exceptions=True)
    assert clock() - begun < 0.5
    assert len(turns._free_at) <= 1
