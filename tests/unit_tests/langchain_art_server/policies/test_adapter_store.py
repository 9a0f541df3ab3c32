"""Checkpoints on disk: a version is complete or absent, and its name is used once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_art.errors import ConfigError, Damaged, InvalidRequest
from langchain_art_server.policies import adapter_store
from langchain_art_server.policies.adapter_store import AdapterStore
from tests.support.soak import count

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


@pytest.mark.parametrize("lost", ["adapter_model.safetensors", "manifest.json"])
def test_a_file_that_is_gone_is_seen(tmp_path: Path, lost: str) -> None:
    store = AdapterStore(tmp_path)
    (store.publish(staged(store), "agent", 1, {"job": None}) / lost).unlink()
    with pytest.raises(Damaged, match=r"agent@1 is damaged and is not used: .* from a backup"):
        store.manifest("agent", 1)


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


@pytest.mark.soak
@settings(max_examples=count(30, 100))
@given(st.text(max_size=80))
def test_no_name_leads_out_of_the_root(name: str) -> None:
    store = AdapterStore.__new__(AdapterStore)
    store._root = Path("/data/adapters")
    try:
        path = store.path(name, 1)
    except InvalidRequest:
        return
    assert path.resolve().parent.parent == Path("/data/adapters")
