"""A base in 4 bits: made once, held by sampler and learner in the same numbers, on a CPU."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from langchain_art.errors import ConfigError
from langchain_art.wire import LoraConfig
from langchain_art_server.backends.base import ModelInfo
from langchain_art_server.backends.models import base_weights
from langchain_art_server.backends.models.loading import load_outline
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.vllm.process import VllmProcess
from langchain_art_server.base_copies import DTYPES
from langchain_art_server.config import Settings, VllmSettings
from langchain_art_server.quantize_base import quantized
from langchain_art_server.start_checks import with_base_folder
from tests.support import forked_start
from tests.support.families import save_family
from tests.support.learner_cases import (
    FILES,
    folder,
    fresh,
    gaps,
    make_rows,
    shake,
    take,
)
from tests.support.ranks import distance
from tests.support.soak import in_soak_alone, share
from tests.support.tiny_models import SMALL, LocalSampler, ask, save_model

pytest.importorskip("bitsandbytes")
#: The sixteen values of NF4 (arXiv 2305.14314, appendix E), whose index is a weight's four bits.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
#: Whole blocks of 64 in each row of a matrix.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
RANK8 = LoraConfig(rank=8, alpha=16.0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("plain") / "model", **SIZES)


@pytest.fixture(scope="module")
def bases(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model in 4 bits, by the dtype that it computes in."""
    where = tmp_path_factory.mktemp("bases")
    return {
        dtype: quantized(str(plain), where, "cpu", dtype)
        for dtype in [*DTYPES][: 3 if share() else 2]
    }


def by_hand(file: Path, name: str) -> torch.Tensor:
    """A matrix, in float64, from the bytes of the file: index times scale, nothing else."""
    with safe_open(file, "pt") as opened:
        packed, absmax = (opened.get_tensor(f"{name}{end}") for end in ("", ".absmax"))
        about = json.loads(
            bytes(opened.get_tensor(f"{name}.quant_state.bitsandbytes__nf4").tolist())
        )
    indices = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten()
    values = torch.tensor(NF4, dtype=torch.float64)[indices.long()].view(-1, 64)
    return (values * absmax.double()[:, None]).view(about["shape"])


def dequantized(base: Path, dtype: torch.dtype) -> Any:
    """A model of plain linear layers in `dtype`, with the base's own numbers by hand."""
    held = base_weights.load_causal(str(base), dtype, torch.device("cpu"))
    config = held.config
    del config.quantization_config
    naive: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    own, quantised = held.state_dict(), base_weights.linears_in_four_bits(held)
    weights = {
        name: own[name].float()
        for name in naive.state_dict()
        if name.removesuffix(".weight") not in quantised
    }
    for name in quantised:
        weights[f"{name}.weight"] = (
            by_hand(base / "model.safetensors", f"{name}.weight").to(dtype).float()
        )
    naive.load_state_dict(weights)
    assert not base_weights.linears_in_four_bits(naive)
    return naive.eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", in_soak_alone("float16")])
def test_outputs_are_those_of_plain_layers_with_these_weights(
    dtype: str, bases: dict[str, Path]
) -> None:
    base, number = bases[dtype], getattr(torch, dtype)
    held: Any = base_weights.load_causal(str(base), number, torch.device("cpu"))
    naive = dequantized(base, number)
    ids = torch.arange(24).view(2, 12)
    with torch.inference_mode():  # as a sampler
        assert torch.equal(held(input_ids=ids).logits, naive(input_ids=ids).logits)
    assert torch.equal(held(input_ids=ids).logits, naive(input_ids=ids).logits)  # as a learner
    layers = base_weights.linears_in_four_bits(held)
    assert len(layers) == 21 and held.get_output_embeddings() not in layers.values()
    assert base_weights.weights_of(held) == base_weights.weights_in(str(base), held.config) != ""
    assert held.num_parameters() == 155_168  # as if it were not quantised: rates depend on it


def test_a_step_is_that_of_lora_on_the_same_weights_in_float32(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    naive = tmp_path / "naive"
    dequantized(bases["float32"], torch.float32).save_pretrained(naive)
    core, reference = LearnerCore(str(bases["float32"])), LearnerCore(str(naive))
    assert type(core._scorer.base) is type(reference._scorer.base)
    own = other = start = shake(fresh(core, tmp_path, RANK8))
    for step in range(1, 4):
        rows, one, two = make_rows(8, seed=step), *(folder(tmp_path, f"{n}{step}") for n in "ab")
        found = take(core, own, one, rows, step)
        expected = take(reference, other, two, rows, step)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        own, other = one, two
    assert distance(own, other, FILES[1]) <= 1e-6 < 1e-2 < distance(own, start, FILES[1])


@pytest.mark.parametrize(
    ("dtype", "most"),
    [("float32", 1e-5), ("bfloat16", 0.012), in_soak_alone("float16", 0.0015)],
)
def test_sampler_and_learner_agree_as_on_an_unquantised_base(
    dtype: str, most: float, bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases[dtype]
    words = ("the weather in Paris", "mail of Ann", "Monday at ten", "to the team")
    core, sampler = LearnerCore(str(base), dtype=dtype), LocalSampler(base, dtype=dtype)
    adapter = shake(fresh(core, tmp_path, RANK8), 0.1)
    sampler.load("a@1", adapter)
    replies = sampler.chat(*[ask(text, adapter="a@1", max_tokens=24, seed=0) for text in words])
    assert gaps(core, adapter, replies).mean() <= most


@pytest.mark.parametrize("family", ["Gemma 3, with images", in_soak_alone("Mistral Small 3")])
def test_a_vision_model_beside_the_text_stays_as_it_is(family: str, tmp_path: Path) -> None:
    model = save_family(family, tmp_path / "model", wide=True)
    base = quantized(str(model), tmp_path, "cpu", "float32")
    core, sampler = LearnerCore(str(base)), LocalSampler(base)
    layers = base_weights.linears_in_four_bits(core.base)
    assert len(layers) == 21 and all("language_model" in name for name in layers)
    plain = load_file(model / "model.safetensors")
    held = load_file(base / "model.safetensors")
    for name in plain:
        if ".layers." not in name or "language_model" not in name:
            assert torch.equal(held[name], plain[name]), name
    adapter = shake(fresh(core, tmp_path, RANK8), 0.1)
    sampler.load("a@1", adapter)
    replies = sampler.chat(*[ask(adapter="a@1", max_tokens=24, seed=seed) for seed in range(4)])
    assert gaps(core, adapter, replies).mean() <= 1e-5


@pytest.mark.soak
def test_it_is_made_once_and_anew_for_other_weights_or_another_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not share():  # `test_gguf_base` starts such a program
        monkeypatch.setattr(subprocess, "run", forked_start.run)
    plain = save_model(tmp_path / "model", **SIZES)
    settings = Settings(model=str(plain), quantization="nf4", data_dir=tmp_path, device="cpu")
    first = with_base_folder(settings, print)
    assert first.base_name == settings.base_name and Path(first.model).parent == tmp_path / "bases"
    written = (Path(first.model) / "model.safetensors").stat().st_mtime_ns
    assert str(quantized(str(plain), tmp_path / "bases", "cpu")) == first.model
    assert (Path(first.model) / "model.safetensors").stat().st_mtime_ns == written
    other = quantized(str(plain), tmp_path / "bases", "cpu", "bfloat16")
    assert str(other) != first.model
    with pytest.raises(ConfigError, match="quantised already"):
        quantized(first.model, tmp_path / "bases", "cpu")
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_quant_type"] = "fp4"  # another format of bitsandbytes
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="expected NF4"):
        LearnerCore(str(other))
    (plain / "chat_template.jinja").write_text("changed")
    made = quantized(str(plain), tmp_path / "bases", "cpu")
    assert (made / "chat_template.jinja").read_text() == "changed"


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype", "words"),
    [
        ("Qwen3Config", {}, None, r"has 32 inputs.*expected multiples of 64"),
        ("Qwen3MoeConfig", SIZES | EXPERTS, None, "expected a dense model"),
        ("Qwen3Config", SIZES, "float64", "expected one of"),
    ],
)
def test_what_cannot_be_quantised_alike_is_refused(
    kind: str, sizes: dict[str, Any], dtype: str | None, words: str, tmp_path: Path
) -> None:
    config = getattr(transformers, kind)(**SMALL | sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=words):
        quantized(str(tmp_path / "model"), tmp_path / "bases", "cpu", dtype)
    assert not list((tmp_path / "bases").glob("*")) or not dtype


def test_vllm_gets_the_same_file_or_refuses(bases: dict[str, Path], tmp_path: Path) -> None:
    settings = Settings(
        model=str(bases["bfloat16"]), dtype="bfloat16", device="cpu", sampler=VllmSettings()
    )
    outline = load_outline(settings)
    info = replace(outline.info, device="cuda")
    assert info.weights.startswith("nf4 ") and info.parameters == 155_168

    def command(info: ModelInfo, *args: str) -> list[str]:
        sampler = VllmSettings(args=args)
        own = settings.model_copy(update={"sampler": sampler})
        return VllmProcess(own, info, tmp_path, ["q_proj"], 8).command()

    argv = command(info)
    for option, value in (
        ("--model", str(bases["bfloat16"])),
        ("--quantization", "bitsandbytes"),
        ("--load-format", "bitsandbytes"),
    ):
        assert argv[argv.index(option) + 1] == value
    assert "--quantization" not in command(replace(info, weights=""))
    for broken, args, words in (
        (replace(info, device="cpu"), (), "kernels for GPUs alone"),
        (replace(info, dtype="float32"), (), "expected bfloat16"),
        (info, ("--tensor-parallel-size=2",), "cannot split"),
        (replace(info, weights=""), ("--quantization=fp8",), "not be the learner's"),
        (replace(info, weights=""), ("--quantization_config={}",), "not be the learner's"),
        (info, ("--logprobs_mode=raw_logprobs",), "this server sets itself"),
        (info, ("--trust_remote_code",), "this server sets itself"),
        (info, ("--config=options.yaml",), "this server sets itself"),
    ):
        with pytest.raises(ConfigError, match=words):
            command(broken, *args)
