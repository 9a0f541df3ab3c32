import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from langchain_art.errors import EngineUnavailable
from langchain_art_server.gateway import health as module
from langchain_art_server.gateway.health import Health
from langchain_art_server.storage.store import Store

MAX_STORED_BYTES = 1 << 20


@pytest.fixture
async def parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Health, Any, Any, Store]]:
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(module, "PROBE_WITHIN", 0.2)
    store = Store(f"sqlite:///{tmp_path / 'art.sqlite3'}")
    sampler, learner = SimpleNamespace(problem=None), SimpleNamespace(problem=None)
    engines = cast("Any", {"sampler": sampler, "learner": learner})
    made = Health(engines, store, tmp_path, MAX_STORED_BYTES, 1 << 20)
    assert made.reasons == {"server": "is starting"}
    made.start()
    yield made, sampler, learner, store
    await made.close()
    assert made.reasons == {"server": "is shutting down"}
    store.close()


async def becomes(health: Health, reasons: dict[str, str]) -> None:
    async with asyncio.timeout(10):
        while health.reasons != reasons:
            await asyncio.sleep(0.01)


async def test_engines_and_store_and_disk_are_told_apart(
    parts: tuple[Health, Any, Any, Store],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    health, sampler, learner, store = parts
    await becomes(health, {})
    sampler.problem, learner.problem = "its process is being started", "is down"
    assert health.reasons == {"sampler": "its process is being started", "learner": "is down"}
    sampler.problem = learner.problem = None

    async def fails() -> None:
        raise EngineUnavailable("postgres://secret is gone")

    with monkeypatch.context() as patched:
        patched.setattr(store, "probe", fails)
        await becomes(health, {"store": "cannot be written to or read; the log says why"})
    await becomes(health, {})
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
        await becomes(health, {"disk": "has 9 bytes free, expected at least 1048576"})
        with pytest.raises(EngineUnavailable, match="min_free_bytes is 1048576") as refused:
            health.require_space()
        assert refused.value.retry_after
    await becomes(health, {})
    health.require_space()
    assert [record.levelname for record in caplog.records if "bytes free" in record.message] == [
        "WARNING",
        "INFO",
    ]


async def test_a_store_that_does_not_answer_is_told(
    parts: tuple[Health, Any, Any, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    health, _, _, store = parts
    answers = asyncio.Event()
    monkeypatch.setattr(store, "probe", answers.wait)
    await becomes(health, {"store": "has not answered for 0.2 s"})
    answers.set()
    await becomes(health, {})
