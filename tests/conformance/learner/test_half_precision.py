"""LoRA on a base in 16 bits: computed in these as the sampler does, learned in float32.

In float16, as on cards without bfloat16, with a dynamic loss scale.
"""

import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from langchain_art.errors import ArtError
from langchain_art.wire import LoraConfig, TrainConfig
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.models import device
from langchain_art_server.backends.models.device import default_dtype
from langchain_art_server.backends.peft.adapter_io import ADAM_EPS, LOSS_SCALE, adam_betas
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.base_copies import chosen_dtype
from tests.support.learner_cases import (
    FILES,
    LENIENT,
    SHAPE,
    contents,
    folder,
    fresh,
    gaps,
    make_rows,
    quiet,
    shake,
    take,
)
from tests.support.ranks import distance, ignore, ranked
from tests.support.tiny_models import LocalSampler, ask, save_model

#: Numbers of two bytes that a layer keeps of a token for each unit of its hidden size, its MLP, its
#: queries and its keys: inputs of linear layers, products and, in float32, what the norms read.
MOST_KEPT = (6.5, 4.5, 4.5, 4.5)
#: As `torch.amp.GradScaler` begins.
FIRST = 2.0**16


@pytest.fixture(scope="module")
def rounded(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with weights that float16 and float32 both hold."""
    out = tmp_path_factory.mktemp("rounded")
    shutil.copytree(tiny, out, dirs_exist_ok=True)
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float16).save_pretrained(out)
    return str(out)


@pytest.fixture(scope="module")
def core(rounded: str) -> LearnerCore:
    return LearnerCore(rounded, dtype="float16")


@pytest.fixture(scope="module")
def twin(rounded: str) -> LearnerCore:
    return LearnerCore(rounded, dtype="float32")


@pytest.fixture
def bfloat16(tiny: str) -> LearnerCore:
    return LearnerCore(tiny, dtype="bfloat16")


def scale_of(adapter: Path) -> tuple[float, float]:
    """The loss scale of a version, and for how many updates it has held."""
    scale, held = load_file(adapter / FILES[2])[LOSS_SCALE].tolist()
    return scale, held


def with_scale(adapter: Path, out: Path, *state: float) -> Path:
    shutil.copytree(adapter, out)
    save_file(
        load_file(adapter / FILES[2]) | {LOSS_SCALE: torch.tensor(state)},
        out / FILES[2],
        metadata={"format": "pt"},
    )
    return out


def gradient(core: LearnerCore, start: Path, share: float) -> torch.Tensor:
    """That of some rows whose advantages are multiplied by `share`, over `share`."""
    rows = [replace(r, advantages=[share * a for a in r.advantages]) for r in make_rows(12)]
    core._hold(start)
    batch = core.batch(rows, TrainConfig(learning_rate=1e-3, **LENIENT))
    core.accumulate(batch, quiet)
    while core._overflowed():
        core._optimizer.zero_grad()
        core.accumulate(batch, quiet)
    flat = [p.grad.flatten() for p in core.parameters.values() if p.grad is not None]
    core._optimizer.zero_grad()
    return torch.cat(flat).double() / share


def test_a_card_without_bfloat16_gets_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        return default_dtype(torch.device(name))

    for capability, dtype in ((7.5, "float16"), (8.0, "bfloat16")):
        monkeypatch.setattr(device, "gpus", lambda now=capability: [{"capability": now}])
        assert [found(one) for one in ("cuda:0", "cpu", "mps")] == [dtype, "float32", "bfloat16"]
        assert chosen_dtype(None, torch.device("cuda"), "a GGUF file") == dtype


@pytest.mark.parametrize(
    ("dtype", "share", "most"),
    [("float16", 1.0, 0.004), ("float16", 1e-5, 0.004), ("bfloat16", 1.0, 0.03)],
)
def test_the_gradient_is_that_of_float32_up_to_rounding(
    dtype: str, share: float, most: float, rounded: str, twin: LearnerCore, tmp_path: Path
) -> None:
    core = LearnerCore(rounded, dtype=dtype)
    start = shake(fresh(core, tmp_path))
    # float16 has three bits more than bfloat16. Without a scale, gradients of smaller advantages
    # are below its smallest number, and nothing would be left of them.
    found, expected = gradient(core, start, share), gradient(twin, start, share)
    assert (found - expected).norm() <= most * expected.norm()


def test_updates_are_those_of_a_float32_twin(
    core: LearnerCore, twin: LearnerCore, tmp_path: Path
) -> None:
    half = whole = start = shake(fresh(core, tmp_path))
    overflows = 0.0
    for step in range(1, 5):
        rows = make_rows(12, seed=step)
        out, other = folder(tmp_path, f"half{step}"), folder(tmp_path, f"whole{step}")
        told = take(core, half, out, rows, step, learning_rate=1e-3)
        expected = take(twin, whole, other, rows, step, learning_rate=1e-3)
        # The first step finds the scale: random weights have large gradients.
        overflows += told["overflows"]
        assert told["loss_scale"] == FIRST / 2**overflows and told["updates"] == 1
        assert told["loss"] == pytest.approx(expected["loss"], abs=2e-3)
        assert told["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-3)
        half, whole = out, other
    assert {t.dtype for t in load_file(half / FILES[1]).values()} == {torch.float32}
    model = {n: p.dtype for n, p in core._scorer.model.named_parameters() if "lora_" in n}
    assert set(model.values()) == {torch.float16}
    # Adam takes a step of the rate for the smallest gradient, whose sign rounding may decide.
    assert distance(half, whole, FILES[1]) <= 0.05 * distance(whole, start, FILES[1])
    # No loss scale where none is needed: nothing of it in metrics or files.
    assert not {"overflows", "loss_scale"} & set(expected)
    assert LOSS_SCALE not in load_file(whole / FILES[2])


def test_an_update_that_overflows_is_skipped_and_made_again_with_half_the_scale(
    core: LearnerCore, rounded: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, rows = folder(tmp_path, "first"), make_rows(12)
    told = take(core, shake(fresh(core, tmp_path)), first, rows)
    assert scale_of(first) == (told["loss_scale"], 1)
    out, next_out = folder(tmp_path, "out"), folder(tmp_path, "next")
    heard: list[str] = []
    huge = with_scale(first, tmp_path / "huge", 2.0**30, 7)
    config = TrainConfig(learning_rate=1e-2, **(LENIENT | {"max_kl": 100.0}))
    with caplog.at_level(logging.WARNING):
        told = core.step(
            LearnerStep(huge, out, 2, rows, config), lambda _, words: heard.append(words)
        )
    overflows, scale = int(told["overflows"]), told["loss_scale"]
    assert overflows >= 10 and scale == 2.0 ** (30 - overflows)
    assert scale_of(out) == (scale, 1)  # the one update that it held for
    assert told["updates"] == 1 and math.isfinite(told["grad_norm"]) and told["step_kept"] == 1
    assert len([r for r in caplog.records if "overflowed float16" in r.message]) == overflows
    assert len([words for words in heard if "overflowed float16" in words]) == overflows
    state = load_file(out / FILES[2])
    assert {int(t) for name, t in state.items() if name.endswith(".step")} == {2}
    # Nothing is left of the updates that were skipped: neither in Adam nor in the adapter.
    good, reference = with_scale(first, tmp_path / "good", scale, 0), folder(tmp_path, "reference")
    LearnerCore(rounded, dtype="float16").step(LearnerStep(good, reference, 2, rows, config), quiet)
    assert contents(out) == contents(reference)
    told = take(core, out, next_out, make_rows(12, seed=2), 3)
    assert told["updates"] == 1 and told["loss_scale"] == scale / 2 ** told["overflows"]
    long, doubled = with_scale(first, tmp_path / "long", 8.0, 1999), folder(tmp_path, "doubled")
    take(core, long, doubled, make_rows(6, seed=2), 2)
    assert scale_of(doubled) == (16.0, 0)  # after 2000 updates


def test_a_gradient_that_no_scale_makes_finite_is_refused(
    core: LearnerCore, tmp_path: Path
) -> None:
    start, first, out = shake(fresh(core, tmp_path)), *(folder(tmp_path, n) for n in ("a", "b"))
    rows = [replace(row, weights=[1e8] * len(row.mask)) for row in make_rows(6)]
    with pytest.raises(ArtError, match=r"gradient norm=(inf|nan).*float16"):
        take(core, start, out, rows)
    assert contents(out) == {}
    told = take(core, start, first, make_rows(6))  # from what is on disk, with its scale
    assert scale_of(first) == (FIRST / 2 ** told["overflows"], 1)


# Seen: 1.2e-5 nats a token in float16; 0.005 in bfloat16, and 0.017 with LoRA in float32 on one
# side.
@pytest.mark.parametrize(("dtype", "most"), [("float16", 0.0011), ("bfloat16", 0.009)])
def test_the_sampler_computes_lora_as_the_learner_does(
    dtype: str, most: float, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model")
    core = LearnerCore(str(model), dtype=dtype)
    assert core.packer.padded_because is None
    adapter = shake(fresh(core, tmp_path, LoraConfig(rank=8, alpha=16.0)))
    sampler = LocalSampler(model, dtype=dtype)
    sampler.load("a@1", adapter)
    words = ("the weather in Paris", "mail of Ann", "Monday at ten", "to the team")
    replies = sampler.chat(*[ask(text, adapter="a@1", max_tokens=24, seed=1) for text in words * 2])
    assert gaps(core, adapter, replies).mean() <= most


@pytest.mark.slow
@pytest.mark.asyncio
async def test_two_shards_skip_the_same_updates(
    core: LearnerCore, rounded: str, tmp_path: Path
) -> None:
    first, out, own = (folder(tmp_path, name) for name in ("first", "out", "own"))
    take(core, shake(fresh(core, tmp_path)), first, make_rows(8))
    huge, rows = with_scale(first, tmp_path / "huge", 2.0**30, 0), make_rows(8, seed=2)
    learner = ranked(rounded, shard=True, dtype="float16")
    await learner.start()
    try:
        config = TrainConfig(learning_rate=1e-2, **LENIENT)
        told = await learner.step(LearnerStep(huge, out, 2, rows, config), ignore)
    finally:
        await learner.close()
    expected = take(core, huge, own, rows, 2)
    assert told["overflows"] >= 10 and abs(told["overflows"] - expected["overflows"]) <= 2
    assert scale_of(out) == (told["loss_scale"], 1)
    assert distance(out, own, FILES[1]) <= 0.05 * distance(own, first, FILES[1])


# --- bfloat16 -------------------------------------------------------------------------------------


def test_no_float32_copy_of_what_lora_reads_is_kept(bfloat16: LearnerCore, tmp_path: Path) -> None:
    fresh(bfloat16, tmp_path)
    sizes = (SHAPE["hidden_size"], SHAPE["intermediate_size"], 32, 16)
    layer = sum(2 * kept * size for kept, size in zip(MOST_KEPT, sizes, strict=True))
    ends = 8 * SHAPE["hidden_size"] + 64  # the last norm; angles of rotary positions
    assert bfloat16.packer._measured() <= SHAPE["num_hidden_layers"] * layer + ends


def test_updates_below_a_bfloat16_ulp_add_up_as_in_float32(
    bfloat16: LearnerCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, rate, steps = shake(fresh(bfloat16, tmp_path)), 1e-6, 12
    grads: list[dict[str, torch.Tensor]] = []
    update = bfloat16._update

    def noted() -> None:
        grads.append(
            {name: p.grad.double() for name, p in bfloat16.parameters.items() if p.grad is not None}
        )
        update()

    monkeypatch.setattr(bfloat16, "_update", noted)
    parent = start
    for step in range(1, steps + 1):
        out = folder(tmp_path, f"v{step}")
        take(bfloat16, parent, out, make_rows(6, seed=step), step, learning_rate=rate)
        parent = out
    assert len(grads) == steps
    before, after = load_file(start / FILES[1]), load_file(parent / FILES[1])
    model = {n.replace(".default", ""): p for n, p in bfloat16._scorer.model.named_parameters()}
    (b1, b2), lost, moved = adam_betas(TrainConfig().momentum), 0, 0
    for name, weight in before.items():
        assert after[name].dtype == torch.float32
        w, m, v = weight.double(), *(torch.zeros_like(weight).double() for _ in range(2))
        for t, grad in enumerate((one[name] for one in grads), 1):
            m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
            w = w - rate * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + ADAM_EPS)
        # Each of the float32 additions rounds by half an ulp of the weight, at most 1.
        torch.testing.assert_close(after[name].double(), w, rtol=0, atol=steps * 2.0**-24)
        assert model[name].dtype == torch.bfloat16
        assert torch.equal(model[name], after[name].bfloat16())
        moved += int((after[name] != weight).sum())
        lost += int((after[name].bfloat16() == weight.bfloat16()).sum())
    count = sum(weight.numel() for weight in before.values())
    # The test is of what it says: nearly all weights moved, and nearly no rounded one did.
    assert moved > 0.99 * count and lost > 0.9 * count


def test_gradients_of_micro_batches_are_added_in_float32(
    bfloat16: LearnerCore, tmp_path: Path
) -> None:
    bfloat16._hold(shake(fresh(bfloat16, tmp_path)))
    rows = make_rows(40)
    config = TrainConfig(tokens_per_microbatch=64, learning_rate=1e-3, **LENIENT)
    bfloat16.accumulate(bfloat16.batch(rows, config), quiet)
    found = [p.grad for p in bfloat16.parameters.values() if p.grad is not None]
    assert {one.dtype for one in found} == {torch.float32} and len(found) == 28
    # A sum of several bfloat16 numbers that is one itself would be chance.
    assert not any(torch.equal(one, one.bfloat16().float()) for one in found)
