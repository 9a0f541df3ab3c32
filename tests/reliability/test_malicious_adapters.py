"""Adapters that somebody put into the data directory: refused in words, and no code of theirs runs.

Whoever writes there can write a manifest with the right digests, too. So the digests do not save
the engines; what reads the files has to.
"""

import json
import os
import pickle
import shutil
import struct
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from langchain_art.errors import ArtError
from langchain_art.wire import LoraConfig
from langchain_art_server.backends.models.adapter_files import (
    CONFIG_FILE,
    MANIFEST,
    WEIGHTS_FILE,
    sha256,
    write_manifest,
)
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.live_server import BASE_MODEL, ForkedServer


class Canary:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def config_with(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | fields))


def weights_with(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    found = {name: change(value) for name, value in load_file(folder / WEIGHTS_FILE).items()}
    save_file(found, folder / WEIGHTS_FILE)


def of_rank(folder: Path, rank: int) -> None:
    small = json.loads((folder / CONFIG_FILE).read_text())["r"]
    config_with(folder, r=rank)
    weights_with(folder, lambda v: np.zeros([rank if n == small else n for n in v.shape], "f"))


def pickled(folder: Path, canary: Path, name: str) -> None:
    (folder / WEIGHTS_FILE).unlink()
    torch.save({"weights": Canary(canary)}, folder / name)


def in_place(folder: Path, canary: Path) -> None:
    """A pickle under the name of the safetensors."""
    (folder / WEIGHTS_FILE).write_bytes(pickle.dumps(Canary(canary)))


def header(folder: Path, size: int) -> None:
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", size) + b'{"a": 1}')


def offsets(folder: Path, _: Path) -> None:
    """A tensor of petabytes whose numbers are not there."""
    huge = {"dtype": "F32", "shape": [2**48], "data_offsets": [0, 2**50]}
    text = json.dumps({"base_model.model.x.lora_A.weight": huge}).encode()
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 64)


def linked(folder: Path, name: str) -> None:
    """A link to a file that is as it should be, outside of the data directory."""
    outside = folder.parents[3] / f"outside-{uuid.uuid4().hex}"
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)


def modules(canary: Path) -> str:
    """The name of a module that makes the canary's file when it is imported."""
    name = f"canary_{canary.name.replace('-', '_')}"
    (canary.parent / f"{name}.py").write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    return name


Spoil = Callable[[Path, Path], None]
#: How an adapter's folder is spoilt, and what is said of it.
HOSTILE: dict[str, tuple[Spoil, str]] = {
    "a .bin": (lambda f, c: pickled(f, c, "adapter_model.bin"), "adapter_model.safetensors"),
    "a .pt": (lambda f, c: pickled(f, c, "adapter_model.pt"), "adapter_model.safetensors"),
    "a pickle named safetensors": (in_place, "read"),
    "a header of 2^63 bytes": (lambda f, _: header(f, 2**63), "read"),
    "a header of 2^64 - 1 bytes": (lambda f, _: header(f, 2**64 - 1), "read"),
    "a tensor of petabytes": (offsets, "read"),
    "NaN": (lambda f, _: weights_with(f, lambda v: v * np.float32(np.nan)), "not finite"),
    "rank 4096": (lambda f, _: of_rank(f, 4096), "r=4096"),
    "auto_map": (
        lambda f, c: config_with(f, auto_map={"AutoModel": f"{modules(c)}.Model"}),
        "auto_map",
    ),
    "auto_mapping": (
        lambda f, c: config_with(
            f, auto_mapping={"parent_library": modules(c), "base_model_class": "x"}
        ),
        "auto_mapping",
    ),
    "a module to import": (
        lambda f, c: config_with(f, megatron_config={"a": 1}, megatron_core=modules(c)),
        "megatron_co",
    ),
    "weights that are a link": (lambda f, _: linked(f, WEIGHTS_FILE), "link"),
    "a config that is a link": (lambda f, _: linked(f, CONFIG_FILE), "link"),
    "a manifest that is a link": (lambda f, _: linked(f, MANIFEST), "link"),
}
LINKS = [name for name in HOSTILE if "link" in name]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedServer]:
    """Of its own: what is put into its data directory stays there."""
    folder = tmp_path_factory.mktemp("malicious")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        made = ForkedServer(folder / "data", "--policy", "tiny")
    made.start()
    yield made
    made.stop()


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_server_refuses_it_and_runs_nothing(server: ForkedServer, kind: str) -> None:
    spoil, words = HOSTILE[kind]
    adapters = server.data_dir / "adapters" / "tiny"
    version = 100 + list(HOSTILE).index(kind)
    canary = server.data_dir.parent / f"canary-{version}"
    whole = {"policy": "tiny", "version": version, "parent": 0, "job": "job-x", "metrics": {}}

    def put() -> None:
        folder = adapters / str(version)
        shutil.copytree(adapters / "0", folder)
        if kind in LINKS:
            seal(folder, whole)
            spoil(folder, canary)
        else:
            spoil(folder, canary)
            (folder / MANIFEST).unlink()
            seal(folder, whole)

    put()
    body = {"model": f"tiny@{version}", "messages": [{"role": "user", "content": "x"}]}
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=body | {"max_tokens": 2})
        assert answer.status_code >= 400, answer.text
        assert words in answer.json()["error"]["message"], answer.text
        fine = http.post("/v1/chat/completions", json=body | {"model": "tiny", "max_tokens": 2})
        assert fine.status_code == 200
        assert http.get("/status").json()["engine_restarts"] == 0
    assert not canary.exists()


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    files = {path.name: sha256(path) for path in folder.iterdir() if path.name != MANIFEST}
    write_manifest(folder, manifest | {"files": files})


@pytest.mark.parametrize("kind", [name for name in HOSTILE if name not in LINKS])
def test_the_learner_refuses_it_and_runs_nothing(
    core: LearnerCore, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, words = HOSTILE[kind]
    folder = tmp_path / "a" / "b" / "c" / "adapter"
    folder.mkdir(parents=True)
    core.init_adapter(folder, LoraConfig(rank=2))
    canary = tmp_path / "canary"
    monkeypatch.syspath_prepend(tmp_path)
    spoil(folder, canary)
    with pytest.raises(ArtError, match=words):
        core.logprobs(folder, [])
    assert not canary.exists()


@pytest.fixture(scope="module")
def core() -> LearnerCore:
    return LearnerCore(str(BASE_MODEL), device="cpu")
