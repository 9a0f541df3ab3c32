import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import event

from langchain_art.errors import (
    ArtError,
    EngineUnavailable,
    InvalidRequest,
    QuotaExceeded,
    UnknownModel,
)
from langchain_art.wire import LoraConfig, PolicySpec, TrainRequest, Trajectory
from langchain_art_server.config import Settings
from langchain_art_server.gateway.policies import Policies, require_memory
from langchain_art_server.jobs.job_runner import JobRunner
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.policies.router import Router
from langchain_art_server.storage.store import Store
from tests.support.postgres import Postgres


def test_a_policy_needs_memory_for_the_versions_that_stay_loaded(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(3 << 20))
    require_memory("p", tmp_path, None)
    require_memory("p", tmp_path, 10.0 * (3 << 20))
    words = r"'p' has adapters of 3 MiB, of which .* hold 10 more at once, .* has 29 MiB free"
    with pytest.raises(QuotaExceeded, match=words):
        require_memory("p", tmp_path, 29.0 * (1 << 20))


class Engines:
    """Sampler and learner; they only hold adapters."""

    info = SimpleNamespace(max_model_len=99)

    async def load_adapter(self, name: str, path: Path, *, probe: bool = True) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def state(self) -> None: ...

    async def init_adapter(self, out: Path, lora: LoraConfig) -> None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (out / name).write_text("{}")


class Made:
    """A server's parts, with a policy p of the versions 0, 1 and 2, of which 2 serves."""

    def __init__(self, folder: Path, fleets: str | None = None) -> None:
        self.database = folder / "art.sqlite3"
        settings, engines = Settings(model="none", data_dir=folder), cast("Any", Engines())
        self.store = store = Store(fleets or settings.url, shared=fleets is not None)
        self.adapters = AdapterStore(folder / "adapters", shared=fleets is not None)
        self.router = Router("none", self.adapters, engines)
        parts = settings, store, self.adapters, self.router
        self.runner = JobRunner(*parts, engines, engines)
        health = cast("Any", SimpleNamespace(require_space=lambda: None))
        self.policies = Policies(*parts, self.runner, engines, engines, health)

    async def fill(self) -> None:
        for version in range(3):
            about = {"policy": "p", "version": version, "parent": version - 1 if version else None}
            about |= {"job": None, "metrics": {}, "created_at": 1.0, "base_model": "none"}
            staged = self.adapters.stage()
            await Engines().init_adapter(staged, LoraConfig())
            self.adapters.publish(staged, "p", version, about)
            await self.store.add_checkpoint(self.adapters.checkpoint(about))
        async with self.store.leases.hold("p"):
            await self.store.add_policy("p", LoraConfig())
            await self.store.roll_back("p", 2, "")
        await self.router.serve("p", 2)

    def locked(self) -> sqlite3.Connection:
        """Another program's transaction, for which a write waits in vain: 0.1 s in place of 10."""
        hurry = "PRAGMA busy_timeout=100"
        event.listen(self.store.engine, "begin", lambda one: one.exec_driver_sql(hurry))
        other = sqlite3.connect(self.database)
        other.execute("BEGIN IMMEDIATE")
        return other


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    found = Made(tmp_path)
    yield found
    found.store.close()


async def test_what_is_not_stored_is_not_routed(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made.fill()
    other = made.locked()
    with pytest.raises(EngineUnavailable):
        await made.policies.rollback("p", 0)
    other.close()
    add = made.store.add_policy

    async def failing(name: str, lora: LoraConfig) -> None:
        with contextlib.closing(made.locked()):
            await add(name, lora)

    monkeypatch.setattr(made.store, "add_policy", failing)
    with pytest.raises(EngineUnavailable):
        await made.policies.create(PolicySpec(name="q"))
    assert made.router.serving == (await made.store.served())[0] == {"p": 2}


async def test_a_start_with_another_base_model_is_told(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await made.fill()
    for model, told in (("none", False), ("/moved/none", False), ("org/other", True)):
        settings = made.policies._settings.model_copy(update={"model": model})
        monkeypatch.setattr(made.policies, "_settings", settings)
        await made.policies.start()
        words = f"p@2 was trained on the base model 'none', and this server has {model!r}"
        assert (words in caplog.text) is told is bool(caplog.records)


async def test_a_version_that_another_server_rolls_back_to_is_not_deleted(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.database()
    one, other = Made(tmp_path, url), Made(tmp_path, url)
    await one.fill()
    load, deleting = one.router.load, list[asyncio.Task[None]]()

    async def slow(policy: str, version: int) -> str:
        name = await load(policy, version)
        deleting.append(asyncio.create_task(other.policies.delete_version(policy, version)))
        await asyncio.wait(deleting, timeout=1.0)
        return name

    monkeypatch.setattr(one.router, "load", slow)
    await one.policies.rollback("p", 1)
    with pytest.raises(InvalidRequest, match="p@1 serves now"):
        await deleting[0]
    assert (await other.store.served())[0] == {"p": 1} and one.adapters.exists("p", 1)
    for made in (one, other):
        made.store.close()


async def test_a_deleted_version_that_a_call_loaded_meanwhile_answers_no_more(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made.fill()
    forget = made.store.forget_checkpoint

    async def slow(policy: str, version: int) -> None:
        async with made.router.use("p@1"):
            pass
        await forget(policy, version)

    monkeypatch.setattr(made.store, "forget_checkpoint", slow)
    await made.policies.delete_version("p", 1)
    with pytest.raises(UnknownModel):
        await made.router.resolve("p@1")


async def test_a_damaged_version_is_replaced_by_one_that_it_descends_from(made: Made) -> None:
    """Not by one that a rollback took out of service."""
    await made.fill()
    await made.store.roll_back("p", 1, "version 2 has collapsed")
    (made.adapters.path("p", 1) / "adapter_model.safetensors").write_text("damaged")
    await made.policies.start()
    assert made.router.serving == (await made.store.served())[0] == {"p": 0}


async def ended(made: Made, job: str) -> str:
    await made.runner.start()
    while not (found := await made.store.jobs.get(job)).ended:
        await made.runner.wait(0.05)
    await made.runner.close()
    return found.error or ""


async def test_a_job_that_was_begun_does_not_undo_a_rollback(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server was killed; before it goes on, the policy is rolled back."""
    await made.fill()
    await made.store.add_trajectories([Trajectory(id="t")])
    await made.store.jobs.add("job", "key", TrainRequest(policy="p", groups=(("t",),)), [], 9)
    await made.store.jobs.begin("job", 2, 3)
    await made.policies.rollback("p", 0, "it invents dates")

    async def batch(job: object, request: object, scored: object, base: int) -> None:
        raise ArtError(f"the step starts from {base}")

    monkeypatch.setattr(made.runner, "_batch", batch)
    assert await ended(made, "job") == "ArtError: the step starts from 0"


async def test_a_job_whose_policy_was_deleted_says_so(made: Made) -> None:
    await made.fill()
    await made.policies.delete("p")
    await made.store.jobs.add("job", "key", TrainRequest(policy="p", groups=(("t",),)), [], 9)
    assert "NotFound: Policy 'p' was deleted" in await ended(made, "job")
