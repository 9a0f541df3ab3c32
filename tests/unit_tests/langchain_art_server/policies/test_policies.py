"""Routing of names to versions: a hot swap fails no call and changes no running call's version."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import event

from langchain_art.errors import (
    ArtError,
    ConfigError,
    EngineUnavailable,
    InvalidRequest,
    QuotaExceeded,
    UnknownModel,
)
from langchain_art.wire import LoraConfig, PolicySpec, TrainRequest, Trajectory
from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest, ModelInfo
from langchain_art_server.config import Settings
from langchain_art_server.gateway.policies import Policies, require_memory
from langchain_art_server.jobs.job_runner import JobRunner
from langchain_art_server.policies import adapter_store
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.policies.router import MAX_PINNED_LOADED, Router
from langchain_art_server.storage.store import Store
from tests.support.postgres import Postgres
from tests.support.soak import count


class RecordingSampler:
    """Records which adapters are loaded; samples nothing."""

    restarts = 0
    info = ModelInfo("base", "base", 0, "cpu", "float32", 16, 16, 8)

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def load_adapter(self, name: str, path: Path, *, probe: bool = True) -> None:
        self.loaded.append(name)

    async def unload_adapter(self, name: str) -> None:
        self.loaded.remove(name)

    async def chat(self, request: ChatRequest) -> AsyncIterator[ChatDelta | ChatReply]:
        raise AssertionError
        yield ChatDelta()


async def of_two_versions(folder: Path) -> tuple[AdapterStore, RecordingSampler, Router]:
    """A router of agent@0 and agent@1, which serves."""
    store, sampler = AdapterStore(folder), RecordingSampler()
    router = Router("base", store, sampler)
    for version in (0, 1):
        store.publish(store.stage(), "agent", version, {"job": None})
    await router.serve("agent", 1)
    return store, sampler, router


async def test_a_name_is_routed_and_the_old_version_stays_while_it_is_used(tmp_path: Path) -> None:
    store, sampler = AdapterStore(tmp_path), RecordingSampler()
    router = Router("base", store, sampler)
    for version in range(MAX_PINNED_LOADED + 3):
        store.publish(store.stage(), "agent", version, {"job": None})
    await router.serve("agent", 0)
    async with router.use("agent") as target:
        assert (target.adapter, target.model) == ("agent@0", "agent@0")
        for version in range(1, MAX_PINNED_LOADED + 3):
            await router.serve("agent", version)
            await router.trim()
        assert "agent@0" in sampler.loaded  # a call still runs on it
        with pytest.raises(InvalidRequest, match="answering 1 calls"):
            await router.forget("agent", 0)
    assert "agent@0" not in sampler.loaded
    assert len(sampler.loaded) == MAX_PINNED_LOADED + 1
    assert (await router.resolve("agent")).version == MAX_PINNED_LOADED + 2
    assert (await router.resolve("agent@0")).version == 0  # kept on disk: loaded again
    assert "agent@0" in sampler.loaded
    assert (await router.resolve("base")).adapter is None


@pytest.mark.parametrize("whole", [False, True])
async def test_what_is_deleted_while_it_is_loaded_is_not_loaded_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    store, sampler, router = await of_two_versions(tmp_path)
    load = sampler.load_adapter
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slowly(name: str, path: Path, *, probe: bool = True) -> None:
        begun.set()
        await goes_on.wait()
        await load(name, path, probe=probe)

    monkeypatch.setattr(sampler, "load_adapter", slowly)
    calls = [asyncio.create_task(router.resolve("agent@0"))]
    await begun.wait()
    gone = asyncio.create_task(router.remove("agent") if whole else router.forget("agent", 0))
    await asyncio.sleep(0)
    if not whole:
        calls.append(asyncio.create_task(router.resolve("agent@0")))
        await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(*calls, gone)
    assert sampler.loaded == ([] if whole else ["agent@1"])
    store.delete("agent", 0)
    with pytest.raises(UnknownModel):
        await router.resolve("agent@0")


async def test_what_is_loaded_for_a_caller_that_left_is_unloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, sampler, router = await of_two_versions(tmp_path)
    load = sampler.load_adapter

    async def slowly(name: str, path: Path, *, probe: bool = True) -> None:
        call.cancel()
        await asyncio.sleep(0)
        await load(name, path, probe=probe)

    monkeypatch.setattr(sampler, "load_adapter", slowly)
    call = asyncio.create_task(router.resolve("agent@0"))
    with pytest.raises(asyncio.CancelledError):
        await call
    while "agent@0" not in sampler.loaded:
        await asyncio.sleep(0)
    await router.keep([("agent", 1)], lambda _policy: False)
    assert sampler.loaded == ["agent@1"]


#: Every bit of a version is changed, or every seventh: one of each byte at least.
STRIDE = 7 // count(1, 7)


def staged(store: AdapterStore, content: bytes = b"weights") -> Path:
    path = store.stage()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(content)
    return path


def test_a_version_is_published_once(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    store.publish(staged(store), "agent", 1, {"job": "job-1"})
    with pytest.raises(ConfigError, match="agent@1 exists"):
        store.publish(staged(store, b"other"), "agent", 1, {"job": "job-2"})
    assert store.path("agent", 1).joinpath("adapter_model.safetensors").read_bytes() == b"weights"


def test_a_deleted_version_leaves_its_name_used(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    left = staged(store)  # half built, as by a crash
    for version in (0, 1, 2):
        assert store.unused("agent") == version
        store.publish(staged(store), "agent", version, {"job": None})
    store.delete("agent", 2)
    store.delete("agent", 1)
    for one in (store, AdapterStore(tmp_path)):  # and a restart does not forget it
        assert (one.versions("agent"), one.unused("agent")) == ([0], 3)
    assert not left.exists()


@pytest.mark.soak
def test_every_byte_of_a_version_is_checked(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    metrics = {"loss": -0.25, "tokens": 12.0}
    path = store.publish(staged(store), "agent", 1, {"job": None, "metrics": metrics})
    for file in path.iterdir():
        whole = file.read_bytes()
        for bit in range(0, 8 * len(whole), STRIDE):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            assert not store.is_whole("agent", 1), (file.name, bit)
        file.unlink()
        assert not store.is_whole("agent", 1), file.name
        file.write_bytes(whole)
    assert store.check("agent", 1)["metrics"] == metrics


def test_the_name_of_every_directory_is_flushed_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[Path, list[str]]] = []

    def noted(path: Path) -> None:
        if path.is_dir():
            flushed.append((path, [entry.name for entry in path.iterdir()]))

    monkeypatch.setattr(adapter_store, "fsync", noted)
    root = tmp_path / "data" / "adapters"
    store = AdapterStore(root)
    store.publish(staged(store), "agent", 0, {"job": None})
    for path in (root / "agent" / "0", root / "agent", root, root / ".deleted", root / ".staging"):
        while path != tmp_path:
            assert any(path.parent == where and path.name in names for where, names in flushed), (
                path
            )
            path = path.parent


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
