"""Base models that bring code, pickles or templates that reach out: no code of theirs runs."""

import json
import os
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from langchain_art.errors import ArtError, ConfigError
from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.models.loading import load_model, load_outline
from langchain_art_server.config import Settings
from langchain_art_server.merge_adapter import merge
from tests.reliability.test_malicious_adapters import Canary, modules
from tests.support.live_server import BASE_MODEL
from tests.support.tiny_models import save_adapter, tokenizer

SAY = [{"role": "user", "content": "x"}]


def model_with(folder: Path, file: str, **fields: Any) -> Path:
    """The demo's model with other fields in one of its JSON files."""
    shutil.copytree(BASE_MODEL, folder)
    known = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(known | fields))
    return folder


def test_code_that_a_model_brings_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked either, as transformers asks at a terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    canary = tmp_path / "canary"
    module = modules(canary)
    names = {"AutoConfig": f"{module}.C", "AutoModelForCausalLM": f"{module}.M"}
    folder = model_with(tmp_path / "model", "config.json", auto_map=names, model_type="strange")
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
    names = {"auto_map": {"AutoTokenizer": [f"{module}.T", f"{module}.T"]}}
    folder = model_with(tmp_path / "model", "tokenizer_config.json", **names)
    shutil.copy(tmp_path / f"{module}.py", folder)
    assert load_outline(Settings(model=str(folder))).tokenizer.encode("x")
    assert not canary.exists()


def test_a_pickle_in_place_of_weights_is_not_read(tmp_path: Path) -> None:
    folder, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(BASE_MODEL, folder)
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
    said = list(SAY)
    made.chat_template = "{{ " + reaches.format(canary) + " }}"
    with pytest.raises(ArtError, match="template"):
        ChatTemplate(made, {made.eos_token_id}).prompt(said, [])
    assert not canary.exists() and said == SAY and os.listdir(tmp_path) == []
