"""Adapters and base models that bring code, pickles, links or templates that reach out.

They are refused in words, and no code of theirs runs. Whoever writes into the data directory can
write a manifest with the right digests, too: what reads the files has to save the engines.
"""

import json
import os
import pickle
import shutil
import struct
import uuid
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire import LoraConfig
from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.models.adapter_files import (
    CONFIG_FILE,
    MANIFEST,
    WEIGHTS_FILE,
    sha256,
    write_manifest,
)
from langchain_art_server.backends.models.loading import load_model, load_outline
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.config import Settings
from langchain_art_server.merge_adapter import merge
from tests.support.live_server import BASE_MODEL, ForkedServer
from tests.support.model_folders import change_json, copied, fields
from tests.support.tiny_models import save_adapter, tokenizer


class Canary:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def of_rank(folder: Path, rank: int) -> None:
    small = json.loads((folder / CONFIG_FILE).read_text())["r"]
    change_json(folder, CONFIG_FILE, r=rank)
    shapes = {name: one.shape for name, one in load_file(folder / WEIGHTS_FILE).items()}
    wide = {k: np.zeros([rank if n == small else n for n in v], "f") for k, v in shapes.items()}
    save_file(wide, folder / WEIGHTS_FILE)


def of_nan(folder: Path, _: Path) -> None:
    held = load_file(folder / WEIGHTS_FILE)
    save_file({k: v * np.float32(np.nan) for k, v in held.items()}, folder / WEIGHTS_FILE)


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


Spoil = Callable[[Path, Path], object]
#: How an adapter's folder is spoilt, and what is said of it.
HOSTILE: dict[str, tuple[Spoil, str]] = {
    "a .bin": (lambda f, c: pickled(f, c, "adapter_model.bin"), "adapter_model.safetensors"),
    "a .pt": (lambda f, c: pickled(f, c, "adapter_model.pt"), "adapter_model.safetensors"),
    "a pickle named safetensors": (in_place, "read"),
    "a header of 2^63 bytes": (lambda f, _: header(f, 2**63), "read"),
    "a header of 2^64 - 1 bytes": (lambda f, _: header(f, 2**64 - 1), "read"),
    "a tensor of petabytes": (offsets, "read"),
    "NaN": (of_nan, "not finite"),
    "rank 4096": (lambda f, _: of_rank(f, 4096), "r=4096"),
    "auto_map": (
        lambda f, c: change_json(f, CONFIG_FILE, auto_map={"AutoModel": f"{modules(c)}.Model"}),
        "auto_map",
    ),
    "auto_mapping": (
        lambda f, c: change_json(
            f, CONFIG_FILE, auto_mapping={"parent_library": modules(c), "base_model_class": "x"}
        ),
        "auto_mapping",
    ),
    "a module to import": (
        lambda f, c: change_json(
            f, CONFIG_FILE, megatron_config={"a": 1}, megatron_core=modules(c)
        ),
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
    folder = adapters / str(version)
    shutil.copytree(adapters / "0", folder)
    if kind not in LINKS:
        spoil(folder, canary)
        (folder / MANIFEST).unlink()
    files = {path.name: sha256(path) for path in folder.iterdir() if path.name != MANIFEST}
    write_manifest(folder, whole | {"files": files})
    if kind in LINKS:
        spoil(folder, canary)
    body = {"model": f"tiny@{version}", "messages": [{"role": "user", "content": "x"}]}
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=body | {"max_tokens": 2})
        assert answer.status_code >= 400, answer.text
        assert words in answer.json()["error"]["message"], answer.text
        fine = http.post("/v1/chat/completions", json=body | {"model": "tiny", "max_tokens": 2})
        assert fine.status_code == 200
        assert http.get("/status").json()["engine_restarts"] == 0
    assert not canary.exists()


@pytest.mark.parametrize("kind", [name for name in HOSTILE if name not in LINKS])
def test_the_learner_refuses_it_and_runs_nothing(
    core: LearnerCore, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, words = HOSTILE[kind]
    (folder := tmp_path / "adapter").mkdir()
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


# --- base models ---------------------------------------------------------------------------------


def test_code_that_a_model_brings_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked either, as transformers asks at a terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    canary = tmp_path / "canary"
    module = modules(canary)
    names = {"AutoConfig": f"{module}.C", "AutoModelForCausalLM": f"{module}.M"}
    brings = fields("config.json", auto_map=names, model_type="strange")
    folder = copied(BASE_MODEL, tmp_path / "model", brings)
    shutil.copy(tmp_path / f"{module}.py", folder)
    adapter = save_adapter(tmp_path / "adapter", BASE_MODEL, seed=0)
    for load in (load_model, load_outline):
        with pytest.raises(ConfigError, match=r"(?s)can not be loaded.*trust_remote_code"):
            load(Settings(model=str(folder)))
    with pytest.raises(ConfigError, match="cannot be put on"):
        merge(str(folder), adapter, tmp_path / "merged")
    assert not canary.exists()


def test_code_that_a_tokenizer_brings_is_not_run(tmp_path: Path) -> None:
    """The tokenizer's own file says all that is needed."""
    module = modules(canary := tmp_path / "canary")
    names = {"AutoTokenizer": [f"{module}.T", f"{module}.T"]}
    brings = fields("tokenizer_config.json", auto_map=names)
    folder = copied(BASE_MODEL, tmp_path / "model", brings)
    shutil.copy(tmp_path / f"{module}.py", folder)
    assert load_outline(Settings(model=str(folder))).tokenizer.encode("x")
    assert not canary.exists()


def test_a_pickle_in_place_of_weights_is_not_read(tmp_path: Path) -> None:
    folder, canary = copied(BASE_MODEL, tmp_path / "model"), tmp_path / "canary"
    for one in folder.glob("*.safetensors*"):
        one.unlink()
    torch.save({"weights": Canary(canary)}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="can not be loaded"):
        load_model(Settings(model=str(folder)))
    adapter = save_adapter(tmp_path / "adapter", BASE_MODEL, seed=0)
    with pytest.raises(ConfigError, match="cannot be put on"):
        merge(str(folder), adapter, tmp_path / "merged")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"weights": Canary(canary)}, adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors is missing"):
        merge(str(BASE_MODEL), adapter, tmp_path / "merged")
    assert not canary.exists()


@pytest.mark.parametrize(
    "reaches",
    [
        "cycler.__init__.__globals__.os.mkdir('{}')",
        "self.__init__.__globals__.__builtins__.__import__('os').mkdir('{}')",
        "''.__class__.__mro__[1].__subclasses__()[0].mkdir('{}')",
        "lipsum.__globals__['os'].mkdir('{}')",
        "messages.append('{}')",
        "namespace.__class__.__base__.__subclasses__()",
        "(messages|map(attribute='__class__.__init__.__globals__')|list)[0].os.mkdir('{}')",
    ],
)
def test_a_template_does_not_reach_out_of_its_sandbox(reaches: str, tmp_path: Path) -> None:
    canary, made = tmp_path / "canary", deepcopy(tokenizer())  # others have the same one
    said = [{"role": "user", "content": "x"}]
    made.chat_template = "{{ " + reaches.format(canary) + " }}"
    with pytest.raises(ArtError, match="template"):
        ChatTemplate(made, {made.eos_token_id}).prompt(said, [])
    assert not canary.exists() and len(said) == 1 and os.listdir(tmp_path) == []
