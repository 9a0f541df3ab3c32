"""Routing of names to versions: a hot swap fails no call and changes no running call's version."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from langchain_art.errors import InvalidRequest, UnknownModel
from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest, ModelInfo
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.policies.router import MAX_PINNED_LOADED, Router


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
