"""Adapters that the sampler must refuse: nothing that it would not compute exactly is left out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from langchain_art.errors import ConfigError
from tests.support.tiny_models import LocalSampler, ask, save_adapter

LAYERS = 3
Q = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def sampler(model: Path) -> LocalSampler:
    return LocalSampler(model)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapters") / "whole", model, 1)


def config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        file = path / "adapter_model.safetensors"
        found = load_file(file)
        change(found)
        save_file(found, file)

    return apply


def drop_layer(found: dict[str, torch.Tensor]) -> None:
    del found[f"{Q}.lora_A.weight"], found[f"{Q}.lora_B.weight"]


def only_bin(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (config(use_dora=True), "use_dora=True is not supported"),
        (config(bias="all"), "bias='all' is not supported"),
        (config(rank_pattern={"q_proj": 2}), "rank_pattern"),
        (config(peft_type="IA3"), "'IA3'"),
        (config(r=8), r"expected \(8, \d+\) \(rank 8"),
        (config(r="4"), "r='4'"),
        (config(lora_alpha="much"), "lora_alpha='much'"),
        (only_bin, r"\.bin"),
        (lambda path: (path / "adapter_config.json").unlink(), "can not be read"),
        (lambda path: (path / "adapter_model.safetensors").write_bytes(b"x" * 99), "can not be"),
        (tensors(lambda t: t.pop(f"{Q}.lora_B.weight")), "lora_B of .*q_proj is missing"),
        (tensors(drop_layer), "targets model.layers.1.self_attn.q_proj"),
        (config(exclude_modules=["k_proj"]), "does not target .*k_proj and 2 other"),
        (config(layers_to_transform=[0, 2]), "does not target model.layers.1"),
        (config(target_modules="(", layers_to_transform=None), "PEFT refuses the targets"),
        (tensors(lambda t: t.clear()), "holds no tensors"),
        (tensors(lambda t: t.update({f"{Q}x.lora_A.weight": torch.ones(4, 32)})), "another model"),
        (tensors(lambda t: t.update({f"{Q}.bias": torch.ones(32)})), "got a tensor"),
        (tensors(lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(4, 32)})), "with shape"),
        (tensors(lambda t: t[f"{Q}.lora_A.weight"].fill_(float("nan"))), "not finite"),
    ],
)
def test_a_broken_or_unsupported_adapter_is_refused(
    sampler: LocalSampler,
    whole: Path,
    tmp_path: Path,
    change: Callable[[Path], Any],
    problem: str,
) -> None:
    path = tmp_path / "adapter"
    shutil.copytree(whole, path)
    change(path)
    with pytest.raises(ConfigError, match=problem):
        sampler.load("bad", path)
    assert "bad" not in sampler.host._adapters


def test_loading_is_idempotent_and_a_name_is_used_once(
    sampler: LocalSampler, whole: Path, tmp_path: Path
) -> None:
    sampler.load("whole@1", whole)
    first = sampler.host._adapters["whole@1"]
    sampler.load("whole@1", whole)
    assert sampler.host._adapters["whole@1"] is first
    with pytest.raises(ConfigError, match="used once"):
        sampler.load("whole@1", tmp_path)
    sampler.unload("whole@1")
    sampler.unload("whole@1")
    assert sampler.host._adapters == {}


def test_a_fresh_adapter_is_the_base_model(
    sampler: LocalSampler, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "fresh"
    shutil.copytree(whole, path)
    tensors(lambda t: [t[key].zero_() for key in t if "lora_B" in key])(path)
    sampler.load("fresh@0", path)
    base, fresh = sampler.chat(ask(seed=1), ask(seed=1, adapter="fresh@0"))
    assert base.token_ids == fresh.token_ids
    assert base.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)
