import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_art.errors import EngineUnavailable
from langchain_art_server.gateway import health as module
from langchain_art_server.gateway.health import Health
from langchain_art_server.storage.store import Store


async def test_a_store_that_does_not_answer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(module, "PROBE_WITHIN", 0.2)
    store, answers = Store(f"sqlite:///{tmp_path / 'art.sqlite3'}"), asyncio.Event()
    monkeypatch.setattr(store, "probe", answers.wait)
    engines: Any = {"sampler": (one := SimpleNamespace(problem=None)), "learner": one}
    health = Health(engines, store, tmp_path, 1 << 20, 1 << 20)

    async def becomes(**reasons: str) -> None:
        async with asyncio.timeout(10):
            while health.reasons != reasons:
                await asyncio.sleep(0.01)

    await becomes(server="is starting")
    health.start()
    await becomes(store="has not answered for 0.2 s")
    answers.set()
    await becomes()

    async def fails() -> None:
        raise EngineUnavailable("postgres://secret is gone")

    with monkeypatch.context() as patched:
        patched.setattr(store, "probe", fails)
        await becomes(store="cannot be written to or read; the log says why")
    await becomes()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
        await becomes(disk="has 9 bytes free, expected at least 1048576")
    await becomes()
    told = [record.levelname for record in caplog.records if "bytes free" in record.message]
    assert told == ["WARNING", "INFO"]
    await health.close()
    await becomes(server="is shutting down")
    store.close()
