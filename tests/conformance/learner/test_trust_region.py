"""`TrainConfig.max_kl`: a step ends within its trust region, whatever the learning rate."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft import training_batch
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.training_batch import TrustRegion
from tests.support.learner_cases import (
    FILES,
    branching_rows,
    contents,
    folder,
    fresh,
    on_policy,
    shake,
    take,
)

RATE, PASSES = 3e-2, 6


def naive_divergence(core: LearnerCore, parent: Path, child: Path, rows: list[Row]) -> float:
    """Mean k3 of KL(parent ‖ child) over the trained tokens, in plain Python."""
    before, after = core.logprobs(parent, rows), core.logprobs(child, rows)
    moves = [
        float(new - old)
        for row, old_T, new_T in zip(rows, before, after, strict=True)
        for trained, old, new in zip(row.mask, old_T, new_T, strict=True)
        if trained
    ]
    return math.fsum(math.expm1(one) - one for one in moves) / len(moves)


@pytest.fixture
def core(tiny: str) -> LearnerCore:
    return LearnerCore(tiny, dtype="float64")


def test_a_step_beyond_its_bound_is_shortened_along_its_own_line(
    core: LearnerCore, tmp_path: Path
) -> None:
    start = fresh(core, tmp_path)
    rows = on_policy(core, start, branching_rows(12))
    free, bound = folder(tmp_path, "free"), folder(tmp_path, "bound")
    take(core, start, free, rows, learning_rate=RATE)
    assert naive_divergence(core, start, free, rows) > 0.02
    metrics = take(core, start, bound, rows, learning_rate=RATE, max_kl=0.01)
    assert 0.005 < metrics["step_kl"] <= 0.01
    found = naive_divergence(core, start, bound, rows)
    assert metrics["step_kl"] == pytest.approx(found, rel=1e-9)
    assert 0 < metrics["step_kept"] < 1
    weights = [load_file(one / FILES[1]) for one in (start, free, bound)]
    for name, parent in weights[0].items():
        along = parent + metrics["step_kept"] * (weights[1][name] - parent)
        torch.testing.assert_close(weights[2][name], along, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("cuts", [8, 0])
def test_in_bfloat16_the_model_computes_with_what_was_kept(
    cuts: int, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_batch, "_MOST_CUTS", cuts)
    core = LearnerCore(tiny, dtype="bfloat16")
    start, out = shake(fresh(core, tmp_path)), folder(tmp_path, "bound")
    rows = on_policy(core, start, branching_rows(12))
    metrics = take(core, start, out, rows, learning_rate=RATE, max_kl=0.01)
    assert (0.005 < metrics["step_kl"] <= 0.01) if cuts else metrics["step_kept"] == 0
    held, read = core.logprobs(out, rows), LearnerCore(tiny, dtype="bfloat16").logprobs(out, rows)
    assert all((a == b).all() for a, b in zip(held, read, strict=True))


def test_further_updates_end_once_the_bound_is_passed(core: LearnerCore, tmp_path: Path) -> None:
    start = fresh(core, tmp_path)
    rows = on_policy(core, start, branching_rows(12))
    reached: list[float] = []
    for updates in range(1, PASSES + 1):
        out = folder(tmp_path, f"{updates}")
        metrics = take(core, start, out, rows, learning_rate=3e-3, optimizer_steps=updates)
        assert metrics["updates"] == updates
        reached.append(naive_divergence(core, start, out, rows))
    assert reached == sorted(reached)
    most = (reached[2] + reached[3]) / 2  # passed by the fourth update
    out = folder(tmp_path, "bound")
    metrics = take(core, start, out, rows, learning_rate=3e-3, optimizer_steps=PASSES, max_kl=most)
    assert metrics["updates"] == 4
    assert 0.8 * most < metrics["step_kl"] <= most
    assert metrics["step_kl"] == pytest.approx(naive_divergence(core, start, out, rows), rel=1e-9)


def test_a_step_within_its_bound_is_the_step_without_one(core: LearnerCore, tmp_path: Path) -> None:
    start = fresh(core, tmp_path)
    rows = on_policy(core, start, branching_rows(12))
    free, bound = folder(tmp_path, "free"), folder(tmp_path, "bound")
    without = take(core, start, free, rows, optimizer_steps=2)
    metrics = take(core, start, bound, rows, optimizer_steps=2, max_kl=100.0)
    assert contents(bound) == contents(free)
    assert metrics["step_kept"] == 1.0 and metrics["updates"] == without["updates"] == 2.0
    assert metrics["step_kl"] == pytest.approx(naive_divergence(core, start, bound, rows), rel=1e-9)
    assert "step_kl" not in without


@pytest.mark.parametrize(("power", "cuts"), [(2, 1), (4, 1), (1, 3), (0.3, 5)])
def test_where_divergence_is_no_square_a_step_is_shortened_again(power: float, cuts: int) -> None:
    one = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    region = TrustRegion([one], 1.0, lambda: None)
    seen: list[float] = []

    def measure() -> float:
        seen.append(float(one.detach().norm()) ** power)
        return seen[-1]

    with torch.no_grad():
        one.copy_(torch.tensor([6.0, 8.0], dtype=torch.float64))
    reached, kept = region.shorten(10.0**power, measure)
    assert reached == seen[-1] <= 1.0 and len(seen) == cuts
    assert one.tolist() == pytest.approx([6 * kept, 8 * kept], rel=1e-12)
    if power == 2:
        assert reached == pytest.approx(0.9, rel=1e-12)


def test_of_a_step_that_stays_too_long_nothing_is_kept() -> None:
    one = nn.Parameter(torch.ones(2))
    region = TrustRegion([one], 1.0, lambda: None)
    with torch.no_grad():
        one.add_(1.0)
    assert region.shorten(5.0, lambda: 5.0) == (0.0, 0.0)
    assert one.tolist() == [1.0, 1.0]
