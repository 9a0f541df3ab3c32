"""Checkpoints on disk: a version is complete or absent, and its name is used once."""

from pathlib import Path

import pytest

from langchain_art.errors import ConfigError
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
