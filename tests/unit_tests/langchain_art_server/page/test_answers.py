import asyncio

import pytest
from pydantic import BaseModel

from langchain_art.training.fit_state import FitState
from langchain_art.wire import TrainJob, TrainResult
from langchain_art_server.page.answers import SharedAnswers
from langchain_art_server.page.overview import series_of
from tests.support.fits import identity


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


@pytest.mark.parametrize("policy", ["p", "q-1"])
def test_a_fit_is_shown_by_its_name_and_an_earlier_one_of_the_name_with_its_id(policy: str) -> None:
    def job(at: float, name: str, fit_id: str) -> TrainJob:
        state = FitState(fit_id=fit_id, name=name, identity=identity())
        return TrainJob(
            id=f"j{at}",
            key=state.key(policy, 1),
            policy=policy,
            state="succeeded",
            created_at=at,
            finished_at=at,
            result=TrainResult(policy=policy, version=1, metrics={}, excluded={}),
        )

    first, second = "0123456789ab", "ba9876543210"
    jobs = [job(1, "my_fit", first), job(2, "my_fit", second), job(3, "", first)]
    jobs.append(job(4, "facade-1", first))
    shown = [one.fit for one in series_of(jobs)]
    assert shown == ["facade-1", first, "my_fit", f"my_fit-{first}"]
