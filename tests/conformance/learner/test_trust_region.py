"""`TrainConfig.max_kl`: a step ends within its trust region, whatever the learning rate."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from langchain_art.wire import TrainConfig
from langchain_art_server.backends.peft import learner_core, training_batch
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.training_batch import TrustRegion, windows
from tests.support.learner_cases import (
    FILES,
    branching_rows,
    contents,
    folder,
    fresh,
    long_runs,
    naive_divergence,
    naive_divergences,
    on_policy,
    shake,
    take,
)

RATE, PASSES = 3e-2, 6


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


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of their sizes, for steps that are small."""
    monkeypatch.setattr(learner_core, "WHOLE", 2048)
    monkeypatch.setattr(training_batch, "SHARE", 1 / 8)
    monkeypatch.setattr(training_batch, "FEWEST", 1024)
    monkeypatch.setattr(training_batch, "MOST", 2048)


def test_a_steps_divergence_costs_a_sample_and_each_cut_one_more(
    core: LearnerCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that go through the model, not calls of it."""
    monkeypatch.setattr(training_batch, "FEWEST", 512)
    monkeypatch.setattr(training_batch, "SHARE", 1 / 12)
    monkeypatch.setattr(training_batch, "MOST_WINDOWS", 16)
    start = shake(fresh(core, tmp_path))
    rows = on_policy(core, start, long_runs(18, 8, 80))
    seen: list[int] = []
    hook = core.base.get_input_embeddings().register_forward_hook(
        lambda _module, args, _out: seen.append(args[0].numel())
    )
    whole = core.batch(rows, TrainConfig()).packing.tokens
    passed: list[int] = []
    for number, bound in enumerate((None, 100.0, 1e-4, 1e-4)):
        out = folder(tmp_path, f"out{number}")
        seen.clear()
        metrics = take(core, start, out, rows, max_kl=bound)
        passed.append(sum(seen))
    hook.remove()
    assert passed[0] == whole
    sample = passed[1] - whole
    assert 0 < sample <= 0.2 * whole
    cuts, rest = divmod(passed[2] - whole - sample, sample)
    assert metrics["step_kept"] < 1 and cuts >= 1 and rest == 0
    assert contents(out) == contents(tmp_path / "out2")  # the same step, the same sample
    assert metrics["step_kl"] <= 1e-4
    off = naive_divergence(core, start, out, rows) - metrics["step_kl"]
    assert 0 < abs(off) < 4 * metrics["step_kl_error"] < metrics["step_kl"]


def test_a_samples_error_is_what_it_says(core: LearnerCore, tmp_path: Path) -> None:
    """Against all tokens, over many samples of one step; a sample against its naive twin."""
    start = shake(fresh(core, tmp_path))
    rows, out = on_policy(core, start, long_runs(6, 8, 80)), folder(tmp_path, "out")
    take(core, start, out, rows)
    every = naive_divergences(core, start, out, rows)
    whole, count = math.fsum(every) / len(every), len(every)
    assert count > learner_core.WHOLE
    estimates: list[float] = []
    errors: list[float] = []
    for seed in range(300):
        means = [
            math.fsum(every[at] for at in one) / len(one) for one in windows(count, 48, [seed])
        ]
        mean = math.fsum(means) / len(means)
        spread = math.fsum((one - mean) ** 2 for one in means) / (len(means) - 1)
        estimates.append(mean)
        errors.append(math.sqrt(spread / len(means)))
    off = [one - whole for one in estimates]
    typical = math.sqrt(math.fsum(one**2 for one in off) / len(off))
    said = math.sqrt(math.fsum(one**2 for one in errors) / len(errors))
    assert abs(math.fsum(off) / len(off)) < 3 * typical / math.sqrt(len(off))  # no bias
    assert 0.7 < typical / said < 1.1 and typical < 0.1 * whole
    batch = core.batch(rows, TrainConfig(max_logprob_gap=None))
    core._hold(start)
    core.accumulate(batch, lambda *_: None)
    core._hold(out)
    for seed in (0, 299):
        found = core.moved(core.watch(batch, 48, seed))
        assert found["terms"] == count
        assert found["moved"] / count == pytest.approx(estimates[seed], rel=1e-9)
        assert math.sqrt(found["variance"]) / count == pytest.approx(errors[seed], rel=1e-9)


@pytest.mark.parametrize(
    ("terms", "rows", "share", "shape"),
    [
        *((2049, 12, 1, (8, 128)), (9001, 64, 1, (16, 70)), (5000, 900, 1, (32, 32))),
        *((700, 64, 4, (4, 64)), (100, 12, 8, (2, 128))),
    ],
)
def test_each_term_is_sampled_equally_often(
    terms: int, rows: int, share: int, shape: tuple[int, int]
) -> None:
    counts = np.zeros(terms)
    for seed in range(2000):
        found = windows(terms, rows, [seed], share)
        assert found.shape == shape
        ends = np.arange(shape[0] + 1) * terms / shape[0]
        assert (np.floor(ends[:-1]) <= found[:, 0]).all() and (found[:, 0] < ends[1:]).all()
        assert ((found - found[:, :1]) % terms == np.arange(shape[1]) % terms).all()
        counts += np.bincount(found.ravel(), minlength=terms)
    expected = 2000 * shape[0] * shape[1] / terms
    # A term is hit or not by each of a few windows: a binomial's spread, or less.
    bound = 6 * math.sqrt(expected * max(1.0, shape[1] / terms))
    assert (abs(counts - expected) < bound).all()
