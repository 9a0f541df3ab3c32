import asyncio

from pydantic import BaseModel

from langchain_art_server.page.answers import SharedAnswers


class Now(BaseModel):
    number: int


async def test_those_who_ask_at_once_share_a_read_that_began_later() -> None:
    shared, reads, may_end = SharedAnswers(), 0, asyncio.Event()

    async def read() -> Now:
        nonlocal reads
        reads += 1
        mine = reads
        await may_end.wait()
        return Now(number=mine)

    first = asyncio.create_task(shared.get("now", read))
    while not reads:
        await asyncio.sleep(0)
    later = [asyncio.create_task(shared.get("now", read)) for _ in range(50)]
    await asyncio.sleep(0)  # they ask
    may_end.set()
    assert (await first).body == b'{"number":1}'
    assert {bytes((await one).body) for one in later} == {b'{"number":2}'}
    assert (await shared.get("now", read)).body == b'{"number":3}' and reads == 3


async def test_a_failed_read_is_one_callers_and_who_leaves_takes_nobody_along() -> None:
    shared, reads = SharedAnswers(), 0

    async def read() -> Now:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0)
        if reads == 1:
            raise ValueError("the database does not answer")
        return Now(number=reads)

    asked = [asyncio.create_task(shared.get("now", read)) for _ in range(4)]
    await asyncio.sleep(0)
    asked[2].cancel()
    found = await asyncio.gather(*asked, return_exceptions=True)
    kinds = [type(one).__name__ for one in found]
    assert kinds == ["ValueError", "Response", "CancelledError", "Response"]
