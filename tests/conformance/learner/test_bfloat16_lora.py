"""LoRA on a bfloat16 base: computed in bfloat16 as the sampler does, learned in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from langchain_art.wire import LoraConfig, TrainConfig
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.adapter_io import ADAM_EPS, adam_betas
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.learner_cases import (
    FILES,
    LENIENT,
    SHAPE,
    contents,
    folder,
    fresh,
    make_rows,
    quiet,
    shake,
    take,
)
from tests.support.ranks import distance, ignore, ranked

#: Numbers of two bytes that a layer keeps of a token for each unit of its hidden size, its MLP, its
#: queries and its keys: inputs of linear layers, products and, in float32, what the norms read.
MOST_KEPT = (6.5, 4.5, 4.5, 4.5)


@pytest.fixture
def core(tiny: str) -> LearnerCore:
    return LearnerCore(tiny, dtype="bfloat16")


def test_no_float32_copy_of_what_lora_reads_is_kept(core: LearnerCore, tmp_path: Path) -> None:
    fresh(core, tmp_path)
    sizes = (SHAPE["hidden_size"], SHAPE["intermediate_size"], 32, 16)
    layer = sum(2 * kept * size for kept, size in zip(MOST_KEPT, sizes, strict=True))
    ends = 8 * SHAPE["hidden_size"] + 64  # the last norm; angles of rotary positions
    assert core.packer._measured() <= SHAPE["num_hidden_layers"] * layer + ends


def test_updates_below_a_bfloat16_ulp_add_up_as_in_float32(
    core: LearnerCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, rate, steps = shake(fresh(core, tmp_path)), 1e-6, 12
    grads: list[dict[str, torch.Tensor]] = []
    update = core._update

    def noted() -> None:
        grads.append(
            {name: p.grad.double() for name, p in core.parameters.items() if p.grad is not None}
        )
        update()

    monkeypatch.setattr(core, "_update", noted)
    parent = start
    for step in range(1, steps + 1):
        out = folder(tmp_path, f"v{step}")
        take(core, parent, out, make_rows(6, seed=step), step, learning_rate=rate)
        parent = out
    assert len(grads) == steps
    before, after = load_file(start / FILES[1]), load_file(parent / FILES[1])
    model = {n.replace(".default", ""): p for n, p in core._scorer.model.named_parameters()}
    (b1, b2), lost, moved = adam_betas(TrainConfig().momentum), 0, 0
    for name, weight in before.items():
        assert after[name].dtype == torch.float32
        w, m, v = (
            weight.double(),
            torch.zeros_like(weight).double(),
            torch.zeros_like(weight).double(),
        )
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


def test_gradients_of_micro_batches_are_added_in_float32(core: LearnerCore, tmp_path: Path) -> None:
    core._hold(shake(fresh(core, tmp_path)))
    rows = make_rows(40)
    config = TrainConfig(tokens_per_microbatch=64, learning_rate=1e-3, **LENIENT)
    batch = core.batch(rows, config)
    core.accumulate(batch, quiet)
    found = {name: p.grad for name, p in core.parameters.items()}
    assert {one.dtype for one in found.values() if one is not None} == {torch.float32}
    assert all(p.grad is None for n, p in core._scorer.model.named_parameters() if "lora_" in n)
    # A sum of several bfloat16 numbers that is one itself would be chance.
    exact = [
        one
        for one in found.values()
        if one is not None and torch.equal(one, one.bfloat16().float())
    ]
    assert len(found) == 28 and not exact


def test_the_gradient_is_that_of_float32_up_to_rounding(
    core: LearnerCore, tiny: str, tmp_path: Path
) -> None:
    start, rows = shake(fresh(core, tmp_path)), make_rows(12)
    config = TrainConfig(learning_rate=1e-3, **LENIENT)
    flat: list[torch.Tensor] = []
    for one in (core, LearnerCore(tiny)):
        one._hold(start)
        one.accumulate(one.batch(rows, config), quiet)
        flat.append(
            torch.cat([p.grad.flatten() for p in one.parameters.values() if p.grad is not None])
        )
    assert (flat[0] - flat[1]).norm() <= 0.03 * flat[1].norm()


def test_memory_and_disk_give_the_same_bits(core: LearnerCore, tiny: str, tmp_path: Path) -> None:
    kept = read_again = fresh(core, tmp_path)
    for step in range(1, 4):
        rows, out, again = (
            make_rows(6, seed=step),
            folder(tmp_path, f"o{step}"),
            folder(tmp_path, f"a{step}"),
        )
        take(core, kept, out, rows, step)
        take(LearnerCore(tiny, dtype="bfloat16"), read_again, again, rows, step)
        kept, read_again = out, again
        assert contents(kept) == contents(read_again)
    for name in FILES[1:]:
        assert {t.dtype for t in load_file(kept / name).values()} == {torch.float32}


def test_another_adapter_in_between_leaves_the_held_one_as_it_was(
    core: LearnerCore, tmp_path: Path
) -> None:
    start, rows = shake(fresh(core, tmp_path)), make_rows(3)
    other = shake(fresh(core, tmp_path, LoraConfig(rank=2, alpha=4.0)), 1.0)
    own = core.logprobs(start, rows)
    with core._bearing(other):
        pass
    assert all((a == b).all() for a, b in zip(own, core.logprobs(start, rows), strict=True))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_two_shards_learn_what_one_whole_does(tiny: str, tmp_path: Path) -> None:
    core = LearnerCore(tiny, dtype="bfloat16")
    start = shake(fresh(core, tmp_path))
    config = TrainConfig(learning_rate=1e-3, tokens_per_microbatch=64, **LENIENT)
    learner = ranked(tiny, shard=True, dtype="bfloat16")
    await learner.start()
    try:
        alone = together = start
        for step in range(1, 4):
            rows = make_rows(10, seed=step)
            out, own = folder(tmp_path, f"together{step}"), folder(tmp_path, f"alone{step}")
            await learner.step(LearnerStep(together, out, step, rows, config), ignore)
            take(core, alone, own, rows, step, learning_rate=1e-3, tokens_per_microbatch=64)
            alone, together = own, out
    finally:
        await learner.close()
    assert {t.dtype for t in load_file(together / FILES[1]).values()} == {torch.float32}
    moved = distance(alone, start, FILES[1])
    # bfloat16 sums in another order: Adam takes a step of the rate for the smallest gradient.
    assert distance(together, alone, FILES[1]) <= 0.2 * moved
