import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from langchain_art.errors import ArtError, Conflict, EngineUnavailable, NotFound
from langchain_art.wire import TrainJob, TrainRequest
from langchain_art_server.config import Settings
from langchain_art_server.jobs.job_runner import JobRunner
from langchain_art_server.storage.store import Store

REQUEST = TrainRequest(policy="p", groups=(("t-1",),))


class Queue(JobRunner):
    """Does with a job what the test says: raises, waits, or finishes it."""

    def __init__(self, store: Store) -> None:
        nothing = cast("Any", None)  # no job comes to it
        super().__init__(Settings(model="none"), store, nothing, nothing, nothing, nothing)
        self.store, self.jobs = store, store.jobs
        self.work: Callable[[], Any] = asyncio.Event().wait
        self.began = asyncio.Event()

    async def _unpublish(self, job: TrainJob) -> None: ...

    async def _run(self, job: TrainJob) -> None:
        await self._jobs.begin(job.id, 0, 1)
        self.began.set()
        await self.work()
        await self._jobs.finish(job.id, None, None)

    async def _failed(self, job: TrainJob, why: str, *, retryable: bool = False) -> None:
        await self._jobs.finish(job.id, None, why, retryable=retryable)

    async def add(self, name: str, most: int = 9) -> TrainJob:
        """A job of this name and key, as the service adds one."""
        job = await self._jobs.add(name, f"key-{name}", REQUEST, [], most)
        self.wake()
        return job

    async def ended(self, name: str) -> TrainJob:
        async with asyncio.timeout(10):
            while not (job := await self._jobs.get(name)).ended:
                await self.wait(0.05)
        return job


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[Queue]:
    store = Store(f"sqlite:///{tmp_path / 'art.sqlite3'}")
    made = Queue(store)
    await made.start()
    yield made
    await made.close()
    store.close()


def raises(error: Exception) -> Callable[[], Any]:
    async def work() -> None:
        raise error

    return work


async def done() -> None:
    """A job that ends at once."""


@pytest.mark.parametrize(
    "transient", [EngineUnavailable("died"), OSError(errno.ENOSPC, "No space left on device")]
)
async def test_a_fault_that_may_pass_leaves_the_job_to_the_same_key(
    queue: Queue, transient: Exception
) -> None:
    queue.work = raises(transient)
    await queue.add("a")
    job = await queue.ended("a")
    assert (job.state, job.retryable, job.attempts) == ("failed", True, 1)
    assert str(transient) in (job.error or "")
    queue.work = done
    again = await queue.add("a")
    assert (again.id, again.state, again.error, again.retryable) == ("a", "queued", None, False)
    job = await queue.ended("a")
    assert (job.state, job.attempts) == ("succeeded", 2)
    assert (await queue.add("a")).state == "succeeded"


@pytest.mark.parametrize("final", [ArtError("the loss is not finite"), KeyError("a bug")])
async def test_a_fault_of_the_request_is_final(queue: Queue, final: Exception) -> None:
    queue.work = raises(final)
    await queue.add("a")
    assert not (await queue.ended("a")).retryable
    assert (await queue.add("a")).state == "failed"


async def test_a_job_that_runs_is_stopped_and_the_next_one_runs(queue: Queue) -> None:
    stopped = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    queue.work = work
    await queue.add("a")
    await queue.began.wait()
    both = await asyncio.gather(queue.cancel("a"), queue.cancel("a"))
    assert {job.state for job in both} == {"cancelled"} and stopped.is_set()
    queue.work = done
    await queue.add("b")
    assert (await queue.ended("b")).state == "succeeded"
    with pytest.raises(Conflict, match="has succeeded"):
        await queue.cancel("b")
    with pytest.raises(NotFound):
        await queue.cancel("c")


async def test_a_job_that_publishes_is_not_cancelled(queue: Queue) -> None:
    published = asyncio.Event()

    async def work() -> None:
        queue.publishes()
        await published.wait()

    queue.work = work
    await queue.add("a")
    await queue.began.wait()
    await asyncio.sleep(0)
    with pytest.raises(Conflict, match="publishing"):
        await queue.cancel("a")
    published.set()
    assert (await queue.ended("a")).state == "succeeded"


@pytest.mark.parametrize("publishes", [False, True])
async def test_a_job_that_another_server_cancels_is_counted_there_alone(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, publishes: bool
) -> None:
    goes_on, counted, other = asyncio.Event(), list[str](), Queue(queue.store)
    for name, one in (("mine", queue), ("other", other)):
        monkeypatch.setattr(one.watch, "ended", lambda job, name=name: counted.append(name))

    async def work() -> None:
        if publishes:
            queue.publishes()
        await goes_on.wait()

    queue.work = work
    await queue.add("a")
    await queue.began.wait()
    await asyncio.sleep(0)
    assert (await other.cancel("a")).state == "cancelled"
    await queue.look()
    goes_on.set()
    queue.work = done
    await queue.add("b")
    assert (await queue.ended("b")).state == "succeeded"
    while "mine" not in counted:
        await queue.wait(0.05)
    assert counted == ["other", "mine"]


async def test_a_job_that_was_begun_goes_before_older_ones(queue: Queue) -> None:
    """Its versions are chosen: another step in between would take the number of its version."""
    await queue.close()
    for name in ("old", "begun"):
        await queue.add(name)
    await queue.jobs.begin("begun", 0, 1)
    first = await queue.jobs.next_open()
    assert first is not None and first.id == "begun"
