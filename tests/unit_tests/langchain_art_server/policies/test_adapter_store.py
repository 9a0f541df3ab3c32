"""Adapter versions: whole or not there; a name is used once; a swap drops nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.errors import ConfigError, InvalidRequest, UnknownModel
from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest, ModelInfo
from langchain_art_server.policies.adapter_store import MAX_PINNED_LOADED, AdapterStore, Router


def staged(store: AdapterStore, content: bytes = b"weights") -> Path:
    path = store.stage()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(content)
    return path


def test_a_published_version_is_whole(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    path = store.publish(staged(store), "agent", 1, {"job": "job-1"})
    manifest = store.manifest("agent", 1)
    assert manifest is not None and manifest["job"] == "job-1"
    assert path == tmp_path / "agent" / "1"
    assert store.versions("agent") == [1]
    assert store.policies() == ["agent"]


def test_a_version_is_published_once(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    store.publish(staged(store), "agent", 1, {"job": "job-1"})
    with pytest.raises(ConfigError, match="agent@1 exists"):
        store.publish(staged(store, b"other"), "agent", 1, {"job": "job-2"})
    assert store.path("agent", 1).joinpath("adapter_model.safetensors").read_bytes() == b"weights"


def test_a_deleted_version_leaves_its_name_used(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    assert store.unused("agent") == 0
    for version in (0, 1, 2):
        store.publish(staged(store), "agent", version, {"job": None})
    assert store.unused("agent") == 3
    store.delete("agent", 2)
    store.delete("agent", 1)
    assert store.versions("agent") == [0]
    assert store.unused("agent") == 3
    assert AdapterStore(tmp_path).unused("agent") == 3, "a restart does not forget it"


def test_what_a_crash_left_half_built_is_gone_at_the_next_start(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    left = staged(store)
    again = AdapterStore(tmp_path)
    assert not left.exists()
    assert again.versions("agent") == []


@pytest.mark.parametrize("damage", ["flip", "cut", "lose", "no manifest", "torn manifest"])
def test_damage_is_seen(tmp_path: Path, damage: str) -> None:
    store = AdapterStore(tmp_path)
    path = store.publish(staged(store), "agent", 1, {"job": None})
    weights = path / "adapter_model.safetensors"
    match damage:
        case "flip":
            weights.write_bytes(b"weightz")
        case "cut":
            weights.write_bytes(b"weig")
        case "lose":
            weights.unlink()
        case "no manifest":
            (path / "manifest.json").unlink()
        case _:
            (path / "manifest.json").write_text('{"files": {"adap')
    assert store.manifest("agent", 1) is None


@given(st.text(max_size=80))
def test_no_name_leads_out_of_the_root(name: str) -> None:
    store = AdapterStore.__new__(AdapterStore)
    store._root = Path("/data/adapters")
    try:
        path = store.path(name, 1)
    except InvalidRequest:
        return
    assert path.resolve().parent.parent == Path("/data/adapters")


class RecordingSampler:
    """Keeps what it is told; samples nothing. The router needs no engine to be tested."""

    restarts = 0
    info = ModelInfo("base", "base", 0, "cpu", "float32", 16, 16)

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


async def test_a_name_is_routed_and_the_old_version_stays_while_it_is_used(tmp_path: Path) -> None:
    store, sampler = AdapterStore(tmp_path), RecordingSampler()
    router = Router("base", store, sampler)
    for version in range(MAX_PINNED_LOADED + 3):
        store.publish(staged(store), "agent", version, {"job": None})
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


@pytest.mark.parametrize("name", ["", "other", "agent@99", "agent@-1", "agent@x", "agent@", "@1"])
async def test_an_unknown_name_says_what_there_is(tmp_path: Path, name: str) -> None:
    store = AdapterStore(tmp_path)
    router = Router("base", store, RecordingSampler())
    store.publish(staged(store), "agent", 0, {"job": None})
    await router.serve("agent", 0)
    with pytest.raises(UnknownModel, match="'agent', 'base'"):
        await router.resolve(name)
