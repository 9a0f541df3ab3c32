"""Merged weights, as they are on disk, against an adapter on its base."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from langchain_art.errors import ArtError, ConfigError
from langchain_art_server.merge_adapter import TEXT, TOKENS, TOLERANCE, Merged, merge
from langchain_art_server.quantize_base import quantized
from tests.support.soak import count, in_soak_alone
from tests.support.tiny_models import load_plain, save_adapter, save_model, tokenizer, with_adapter

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Whole blocks of 64 in each row of a matrix, for a base in 4 bits.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def change(file: Path, change: dict[str, Tensor], *, only: str = "") -> None:
    """Write a file's tensors anew, some of them changed; `only`: those with it in the name."""
    held = {name: one for name, one in load_file(file).items() if only in name}
    save_file(held | change, file, {"format": "pt"})


def scaled(adapter: Path, factor: float) -> Path:
    """The adapter with an update that is so many times as large."""
    held = load_file(adapter / ADAPTER)
    change(adapter / ADAPTER, {n: t * factor for n, t in held.items() if "lora_B" in n})
    return adapter


def divergences(base: Path, adapter: Path, out: Path) -> tuple[float, float]:
    """KL(adapter ‖ base) and KL(adapter ‖ written) on the same text, in float64 throughout."""
    ids = tokenizer()(TEXT, return_tensors="pt").input_ids[:, :TOKENS]
    models = (with_adapter(base, adapter), load_plain(base), load_plain(out))
    with torch.inference_mode():
        adapted, plain, written = (
            m.double()(input_ids=ids).logits[0].log_softmax(-1) for m in models
        )
    kl = torch.nn.functional.kl_div
    left, trained = (
        float(kl(q, adapted, reduction="batchmean", log_target=True)) for q in (written, plain)
    )
    return trained, left


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model by what its weights are; those in 4 bits by what they compute in."""
    where = tmp_path_factory.mktemp("bases")
    made = {name: save_model(where / name, dtype=name, **SIZES) for name in DTYPES}
    if importlib.util.find_spec("bitsandbytes"):
        for name in ("float32", "bfloat16"):
            made[f"nf4 in {name}"] = quantized(str(made["float32"]), where, "cpu", name)
    return made


@pytest.mark.parametrize("name", ["bfloat16", in_soak_alone("float16")])
def test_what_rounding_loses_of_a_small_update_is_said_and_float32_keeps_it(
    name: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases[name]
    adapter = scaled(
        save_adapter(tmp_path / "adapter", base, 1), 3e-3 if name == "bfloat16" else 3e-4
    )
    rounded = merge(str(base), adapter, tmp_path / "rounded")
    trained, left = divergences(base, adapter, tmp_path / "rounded")
    assert rounded.trained == pytest.approx(trained, rel=0.02)
    assert rounded.left == pytest.approx(left, rel=0.02)
    assert rounded.lost > TOLERANCE
    assert str(rounded).startswith(f"WARNING: merged in {name}: {left / trained:.0%} of what was")
    assert "--float32" in str(rounded)
    exact = merge(str(base), adapter, tmp_path / "exact", float32=True)
    trained, left = divergences(base, adapter, tmp_path / "exact")
    assert max(exact.lost, left / trained) < 1e-3 and "WARNING" not in str(exact)
    assert load_plain(tmp_path / "exact").dtype == torch.float32
    large = merge(str(base), scaled(adapter, 300), tmp_path / "large")
    assert large.lost < TOLERANCE and "WARNING" not in str(large)
    nothing = merge(str(base), scaled(adapter, 0.0), tmp_path / "nothing")
    assert nothing == Merged(0.0, 0.0, name)
    before, after = load_file(base / WEIGHTS), load_file(tmp_path / "nothing" / WEIGHTS)
    assert all(torch.equal(before[name], after[name]) for name in before.keys() | after.keys())


@pytest.mark.parametrize("kind", ["qwen3", in_soak_alone("gemma2")])
def test_a_right_merge_is_written_however_large_the_logits(kind: str, tmp_path: Path) -> None:
    """float32's own error of such a logit is more than 0.001, and no error of the merge."""
    changes = {"final_logit_softcapping": None} if kind == "gemma2" else {}
    base = save_model(tmp_path / "base", kind, **changes)
    change(base / WEIGHTS, {"lm_head.weight": load_file(base / WEIGHTS)["lm_head.weight"] * 1000})
    adapter = save_adapter(tmp_path / "adapter", base, 1)
    assert merge(str(base), adapter, tmp_path / "out").lost < 1e-6


def test_a_merge_that_changes_the_model_is_refused(tmp_path: Path) -> None:
    """A head whose weights are the embedding's, too: merged into one, it is in both."""
    base = save_model(tmp_path / "base", tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base, 1, target_modules=["lm_head", "q_proj"])
    change(adapter / ADAPTER, {}, only="lora_")
    with pytest.raises(
        ArtError, match=r"nats a token \(KL\) from the adapter, before any rounding"
    ):
        merge(str(base), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_the_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", dtype="float16")
    adapter = scaled(save_adapter(tmp_path / "adapter", base, 1), 1e6)
    with pytest.raises(ArtError, match="do not fit into float16"):
        merge(str(base), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert merge(str(base), adapter, tmp_path / "out", float32=True).lost < 1e-3


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    """PEFT loads what fits, and leaves the other layers as the base's."""
    base = save_model(tmp_path / "base", num_hidden_layers=2)
    adapter = save_adapter(tmp_path / "adapter", save_model(tmp_path / "other"), 1)
    with pytest.raises(ConfigError, match=r"layers\.2\..*made for another model") as error:
        merge(str(base), adapter, tmp_path / "out")
    assert "\n" not in str(error.value)


@pytest.mark.soak
@pytest.mark.parametrize(  # of the part, one dtype and one base in 4 bits
    "seed", [one if one in (1, 4) else in_soak_alone(one) for one in range(count(5, 400))]
)
def test_what_is_written_is_the_rounded_sum_and_what_it_lost_is_said(
    seed: int, bases: dict[str, Path], tmp_path: Path
) -> None:
    drawn = random.Random(seed)
    kind = list(bases)[seed % len(bases)]
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    rank, alpha, stable = drawn.choice([1, 2, 5, 16]), drawn.choice([1, 8, 64]), seed % 3 == 0
    shape = {"r": rank, "lora_alpha": alpha, "use_rslora": stable}
    targets = drawn.sample(modules, drawn.randint(1, 7))
    float32 = drawn.random() < 0.25
    adapter = tmp_path / "adapter"
    save_adapter(adapter, bases["float32"], seed, target_modules=targets, **shape)
    scaled(adapter, 10 ** drawn.uniform(-4, 0))
    said = merge(str(bases[kind]), adapter, tmp_path / "out", float32=float32)
    dtype = torch.float32 if float32 else DTYPES[kind.removeprefix("nf4 in ")]
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert said.dtype == str(dtype).removeprefix("torch.")
    assert {one.dtype for one in written.values()} == {dtype}

    plain = load_plain(bases[kind])
    if kind.startswith("nf4"):
        plain = plain.dequantize()
    before, pairs = plain.state_dict(), load_file(adapter / ADAPTER)
    scale = alpha / rank ** (0.5 if stable else 1.0)
    assert written.keys() == before.keys()
    for name, after in written.items():
        exact = before[name].double()
        size = exact.abs()
        side = f"base_model.model.{name.removesuffix('weight')}lora_{{}}.weight"
        if side.format("A") in pairs:
            a, b = (pairs[side.format(one)].double() for one in "AB")
            exact, size = exact + scale * b @ a, size + scale * b.abs() @ a.abs()
        # Rounded to the nearest number of the dtype, from a sum of products in float32.
        nearest = torch.finfo(dtype).eps * exact.abs() / 2 + torch.finfo(dtype).smallest_normal
        summed = (rank + 3) * torch.finfo(torch.float32).eps * size
        assert bool(((after.double() - exact).abs() <= nearest + summed).all()), name

    if kind.startswith("nf4"):
        base = tmp_path / "plain"
        plain.save_pretrained(base)
    else:
        base = bases[kind]
    trained, left = divergences(base, adapter, tmp_path / "out")
    assert said.lost == pytest.approx(left / trained, rel=0.05, abs=1e-3)
    assert (said.lost < 1e-4) == ("less than 0.01% of what was trained is lost" in str(said))
    assert ("WARNING" in str(said)) == (said.lost > TOLERANCE)
