import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

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


async def test_a_store_that_does_not_answer_is_told(
    parts: tuple[Health, Any, Any, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    health, _, _, store = parts
    answers = asyncio.Event()
    monkeypatch.setattr(store, "probe", answers.wait)
    await becomes(health, {"store": "has not answered for 0.2 s"})
    answers.set()
    await becomes(health, {})
