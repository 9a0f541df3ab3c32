import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from langchain_art.wire import PreferenceConfig, TrainJob, TrainRequest, Trajectory, Turn
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.config import Settings
from langchain_art_server.jobs import job_runner
from langchain_art_server.jobs.job_runner import JobRunner
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.policies.router import Router
from langchain_art_server.storage.reward_snapshot import RewardSnapshot
from langchain_art_server.storage.store import Store
from tests.support.call_records import record


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
