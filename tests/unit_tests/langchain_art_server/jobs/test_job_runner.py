import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from langchain_art.errors import ArtError, Conflict
from langchain_art.wire import PreferenceConfig, TrainJob, TrainRequest, Trajectory, Turn
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.config import Settings
from langchain_art_server.jobs import job_runner
from langchain_art_server.jobs.admission_gate import AdmissionGate
from langchain_art_server.jobs.job_runner import JobRunner
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.policies.router import Router
from langchain_art_server.storage.reward_snapshot import RewardSnapshot
from langchain_art_server.storage.store import Store
from tests.support.call_records import record

REQUEST = TrainRequest(policy="p", groups=(("t-1",),))


class Queue(JobRunner):
    """Does with a job what the test says: raises, waits, or finishes it."""

    def __init__(self, store: Store) -> None:
        nothing = cast("Any", None)  # no job comes to it
        super().__init__(Settings(model="none"), store, nothing, nothing, nothing, nothing)
        self.store, self.jobs = store, store.jobs
        self.work: Callable[[], Any] = asyncio.Event().wait
        self.began = asyncio.Event()
        self.withdrawn = list[str]()

    async def _unpublish(self, job: TrainJob) -> None:
        self.withdrawn.append(job.id)

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


async def done() -> None:
    """A job that ends at once."""


@pytest.mark.parametrize("final", [ArtError("the loss is not finite"), KeyError("a bug")])
async def test_a_fault_of_the_request_is_final(queue: Queue, final: Exception) -> None:
    async def raises() -> None:
        raise final

    queue.work = raises
    await queue.add("a")
    assert not (await queue.ended("a")).retryable
    assert (await queue.add("a")).state == "failed"


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
    assert queue.withdrawn == (["a"] if publishes else [])
    assert other.withdrawn == ["a"]


async def test_a_job_that_was_begun_goes_before_older_ones(queue: Queue) -> None:
    """Its versions are chosen: another step in between would take the number of its version."""
    await queue.close()
    for name in ("old", "begun"):
        await queue.add(name)
    await queue.jobs.begin("begun", 0, 1)
    first = await queue.jobs.next_open()
    assert first is not None and first.id == "begun"


async def test_a_store_that_fails_for_a_moment_does_not_end_all_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(model="none", data_dir=tmp_path)
    store, adapters = Store(settings.url), AdapterStore(tmp_path / "adapters")
    engine = cast("Any", None)  # the job fails before it comes to one
    router = Router("none", adapters, engine)
    runner = JobRunner(settings, store, adapters, router, engine, engine)
    finish, failures = store.jobs.finish, 0

    async def failing(*args: Any, **options: Any) -> None:
        nonlocal failures
        failures += 1
        if failures == 1:
            raise OSError("no space left on device")
        await finish(*args, **options)

    monkeypatch.setattr(store.jobs, "finish", failing)
    monkeypatch.setattr(job_runner, "RETRY_SECONDS", 0.01)
    await store.jobs.add("job-1", "key-1", TrainRequest(policy="nobody", groups=(("t-1",),)), [], 9)
    await runner.start()
    try:
        async with asyncio.timeout(10):
            while (await store.jobs.get("job-1")).state != "failed":
                await asyncio.sleep(0.01)
    finally:
        await runner.close()
        store.close()
    assert failures == 2
    assert [r.levelno for r in caplog.records if "jobs go on" in r.message] == [logging.ERROR]


async def test_pairs_are_weighed_while_the_learner_has_the_device(tmp_path: Path) -> None:
    """Where sampler and learner take turns, the logprobs of pairs may need all of its memory."""
    settings = Settings(model="none", data_dir=tmp_path, take_turns=True)
    store, adapters = Store(settings.url), AdapterStore(tmp_path / "adapters")
    seen: list[str] = []

    class Engines:
        """Both of them: notes what is asked of it, in order."""

        info = SimpleNamespace(max_model_len=99)

        async def sleep(self) -> None:
            seen.append("sleep")

        async def wake(self) -> None:
            seen.append("wake")

        async def logprobs(self, adapter: Path | None, rows: list[Row]) -> list[list[float]]:
            assert runner.gate._shut_since is not None
            seen.append("base" if adapter is None else "policy")
            return [[-1.0] * len(row.token_ids) for row in rows]

    engine = cast("Any", Engines())
    router = Router("none", adapters, engine)
    runner = JobRunner(settings, store, adapters, router, engine, engine)
    runs = [Trajectory(id=name, turns=(Turn(call_id=name, messages=()),)) for name in ("w", "l")]
    await store.add_calls([record("w", said=(2, 3)), record("l", said=(4,))])
    await store.add_trajectories(runs)
    request = TrainRequest(policy="p", groups=(("w", "l"),), config=PreferenceConfig())
    snapshots = {run.id: RewardSnapshot.of(run, request) for run in runs}
    job = TrainJob(id="j", key="k", policy="p", state="running", created_at=0.0)
    adapters.publish(adapters.stage(), "p", 0, {})
    batch = await runner._batch(job, request, snapshots, 0)
    pairs = await runner._weigh(job, batch)
    store.close()
    assert pairs is not None and pairs.base == [(-2.0, -1.0)]
    assert seen == ["sleep", "base", "policy", "wake"] and runner.gate._shut_since is None
    assert [row.weights for row in batch.rows] == [[0.0, 0.05, 0.05], [0.0, -0.05]]


async def test_who_gives_up_makes_room_and_a_failed_step_opens_it() -> None:
    gate = AdmissionGate(1)
    with pytest.raises(ZeroDivisionError):
        async with gate.shut():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), gate.through():
                    pass
            waiting = asyncio.create_task(_pass(gate))
            await asyncio.sleep(0.01)
            raise ZeroDivisionError
    await asyncio.wait_for(waiting, 30)


async def _pass(gate: AdmissionGate) -> None:
    async with gate.through():
        pass
