"""Jobs go on when the store comes back."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, cast

import pytest

from langchain_art.wire import TrainRequest
from langchain_art_server.config import Settings
from langchain_art_server.jobs import job_queue
from langchain_art_server.jobs.job_runner import JobRunner
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.policies.router import Router
from langchain_art_server.storage.store import Store


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
    monkeypatch.setattr(job_queue, "RETRY_SECONDS", 0.01)
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
