"""The whole objective of a step against a twin in plain Python, and its stats against loops."""

import math
import random
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire import (
    CISPO,
    DPPOTV,
    GSPO,
    ClippedRatio,
    Distillation,
    IcePop,
    JobConfig,
    KLPenalty,
    LRSchedule,
    SequenceMask,
    SFTConfig,
    TrainConfig,
    TruncatedIS,
)
from langchain_art_server.algorithms.loss.importance_sampling import importance
from langchain_art_server.algorithms.loss.logprob_gap import check_sync, suspects_of
from langchain_art_server.algorithms.loss.loss_stats import LossStats
from langchain_art_server.algorithms.loss.lr_schedule import learning_rate
from langchain_art_server.algorithms.loss.objective import StepLoss, TrainedTokens, objective
from tests.support.naive_losses import Naive, naive_importance, naive_losses
from tests.support.soak import count

torch.set_num_threads(1)
F64 = torch.float64
CHOICES: list[dict[str, Any]] = [
    {},
    {"loss": ClippedRatio(dual_clip=None, importance_sampling=None), "guard": None},
    {"loss": ClippedRatio(dual_clip=1.5, importance_sampling=IcePop()), "guard": 2.0},
    {"loss": GSPO(clip_low=0.1, clip_high=0.1, importance_sampling=SequenceMask())},
    {"loss": GSPO(importance_sampling=SequenceMask(low=0.5))},
    {"loss": CISPO(clip_low=0.2, clip_high=0.3)},
    {"loss": DPPOTV(), "guard": None},
    {
        "kl": KLPenalty(estimator="k1", coefficient=0.1),
        "loss": ClippedRatio(importance_sampling=None),
    },
    {"kl": KLPenalty(estimator="k2", coefficient=0.3)},
    {"loss": CISPO(), "kl": KLPenalty(estimator="k3", coefficient=0.2), "guard": None},
    {"distillation": Distillation(teacher="t@3", coefficient=0.7), "loss": GSPO()},
    {"loss": GSPO(), "kl": KLPenalty(estimator="k3", coefficient=0.2), "entropy_bonus": 0.5},
    {"kind": "sft"},
]


def made(choice: dict[str, Any]) -> JobConfig:
    return SFTConfig(**choice) if choice.get("kind") == "sft" else TrainConfig(**choice)


#: Lower and upper bound and dual clip, each drawn by itself.
BOUNDS = st.tuples(
    st.sampled_from([0.1, 0.2, 0.5]),
    st.sampled_from([0.1, 0.28, 3.0]),
    st.sampled_from([None, 1.5, 3.0]),
)


def bounded(config: JobConfig, bounds: tuple[float, float, float | None] | None) -> JobConfig:
    """The config, whose loss has these bounds; None: its own."""
    loss: Any = getattr(config, "loss", None)
    if bounds is None or loss is None:
        return config
    low, high, dual = bounds
    changes = {"clip_low": low, "clip_high": min(high, 0.9) if loss.kind == "dppo_tv" else high}
    changes |= {"dual_clip": dual} if loss.kind == "clip" else {}
    return config.model_copy(update={"loss": loss.model_copy(update=changes)})


@st.composite
def cases(draw: st.DrawFn) -> dict[str, list[float]]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    tokens = draw(st.integers(1, 9))
    moved = draw(st.sampled_from([0.0, 0.05, 0.5, 2.0]))
    gap = draw(st.sampled_from([0.0, 0.1, 1.0, 2.0]))
    new = [-rng.uniform(0.1, 4) for _ in range(tokens)]
    old = [min(-1e-3, x + rng.gauss(0, moved)) for x in new]
    return {
        "logprobs": new,
        "old_logprobs": old,
        "sampler_logprobs": [min(-1e-3, x + rng.gauss(0, gap)) for x in old],
        "advantages": [rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 3)]) for _ in range(tokens)],
        "weights": [rng.uniform(0, 0.5) for _ in range(tokens)],
        "calls": [rng.randrange(3) for _ in range(tokens)],
        "reference_logprobs": [-rng.uniform(0.1, 4) for _ in range(tokens)],
    }


def terms(case: dict[str, list[float]], which: list[int] | None = None) -> dict[str, Any]:
    """Arguments of `objective`."""
    columns: dict[str, Tensor] = {}
    for name, values in case.items():
        kept = [values[t] for t in range(len(values)) if which is None or t in which]
        columns[name] = torch.tensor(kept, dtype=torch.long if name == "calls" else F64)
    tokens = TrainedTokens(**{field.name: columns[field.name] for field in fields(TrainedTokens)})
    names = ("logprobs", "old_logprobs", "reference_logprobs")
    return {"tokens": tokens} | {f"{name}_T": columns.get(name) for name in names}


def naive_terms(case: dict[str, list[float]], config: JobConfig) -> list[Naive]:
    if isinstance(config, SFTConfig):
        return [(-new, -1.0, "") for new in case["logprobs"]]
    loss: Any = config.loss
    old = case["sampler_logprobs" if loss.kind == "dppo_tv" else "old_logprobs"]
    given = (case["logprobs"], old, case["advantages"], case["calls"], loss.clip_low)
    return naive_losses(loss.kind, *given, loss.clip_high, getattr(loss, "dual_clip", None))


def naive_weights(
    case: dict[str, list[float]], config: JobConfig
) -> list[tuple[float, bool, bool]]:
    gaps = [o - s for o, s in zip(case["old_logprobs"], case["sampler_logprobs"], strict=True)]
    loss, guard = getattr(config, "loss", None), getattr(config, "guard", None)
    sampling = getattr(loss, "importance_sampling", None)
    return naive_importance(gaps, case["calls"], sampling, guard)


def naive(case: dict[str, list[float]], config: JobConfig) -> tuple[float, list[float]]:
    """The loss, and its gradient with respect to each logprob, by hand."""
    losses, weights = naive_terms(case, config), naive_weights(case, config)
    penalty, bonus = getattr(config, "kl", None), getattr(config, "entropy_bonus", 0.0)
    teacher = getattr(config, "distillation", None)
    total, slopes = 0.0, []
    for t, (loss, slope, _) in enumerate(losses):
        factor = case["weights"][t] * weights[t][0]
        gradient = factor * slope
        if isinstance(getattr(config, "loss", None), GSPO):
            # Its ratio moves with the mean of the call's tokens.
            own = [k for k, call in enumerate(case["calls"]) if call == case["calls"][t]]
            shares = [case["weights"][k] * weights[k][0] * losses[k][1] for k in own]
            gradient = math.fsum(shares) / len(own)
        new, old, base = (
            case[name][t] for name in ("logprobs", "old_logprobs", "reference_logprobs")
        )
        r, d = math.exp(new - old), new - base
        if penalty is not None:
            kinds = {"k1": r * d, "k2": r * d * d / 2, "k3": r * (math.exp(-d) + d - 1)}
            loss += penalty.coefficient * kinds[penalty.estimator]
            steep = r * (d + 1 if penalty.estimator == "k1" else d)
            gradient += factor * penalty.coefficient * steep
        if teacher is not None:  # outside of a clipped ratio: the advantage -d has the slope r d
            loss += teacher.coefficient * r * d * d / 2
            gradient += factor * teacher.coefficient * r * d
        if bonus:
            loss += bonus * r * new * new / 2
            gradient += factor * bonus * r * new
        total += factor * loss
        slopes.append(gradient)
    return total, slopes


def naive_metrics(case: dict[str, list[float]], config: JobConfig) -> dict[str, float]:
    if isinstance(config, SFTConfig):  # nobody drew its tokens
        case = case | {"sampler_logprobs": case["old_logprobs"]}
    new, old, sampler, base = (
        case[name]
        for name in ("logprobs", "old_logprobs", "sampler_logprobs", "reference_logprobs")
    )
    n = len(new)
    gaps = [o - s for o, s in zip(old, sampler, strict=True)]
    moves = [math.exp(x - o) for x, o in zip(new, old, strict=True)]
    weights = naive_weights(case, config)
    used = [weight for weight, _, _ in weights]
    bounds = [bound for _, _, bound in naive_terms(case, config)]
    squares = math.fsum(w * w for w in used)
    away = [math.expm1(b - x) - (b - x) for b, x in zip(base, new, strict=True)]
    return {
        "ratio_mean": math.fsum(moves) / n,
        "ratio_max_dev": max(abs(r - 1) for r in moves),
        "divergence": math.fsum(r - 1 - math.log(r) for r in moves) / n,
        "clip_low_fraction": bounds.count("low") / n,
        "clip_high_fraction": bounds.count("high") / n,
        "logprob_gap_mean": math.fsum(map(abs, gaps)) / n,
        "logprob_gap_max": max(map(abs, gaps)),
        "kl": math.fsum(math.expm1(g) - g for g in gaps) / n,
        "importance_mean": math.fsum(map(math.exp, gaps)) / n,
        "importance_ess": math.fsum(used) ** 2 / (n * squares) if squares else 0.0,
        "importance_limited_fraction": sum(limited for _, limited, _ in weights) / n,
        "guarded_fraction": sum(guarded for _, _, guarded in weights) / n,
        "kl_reference": math.fsum(away) / n,
        "entropy": -math.fsum(old) / n,
    }


@pytest.mark.soak
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@settings(max_examples=count(20, 60), deadline=None)
@given(cases(), st.sets(st.integers(0, 2)), st.none() | BOUNDS)
def test_objective_gradient_and_stats_equal_the_naive_twins_and_parts_add_up(
    choice: dict[str, Any],
    case: dict[str, list[float]],
    first: set[int],
    bounds: tuple[float, float, float | None] | None,
) -> None:
    config, given_terms = bounded(made(choice), bounds), terms(case)
    given_terms["logprobs_T"].requires_grad_()
    loss, stats = objective(**given_terms, config=config)
    (gradient_T,) = torch.autograd.grad(loss, given_terms["logprobs_T"])
    total, slopes = naive(case, config)
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert gradient_T.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    got = stats.metrics() | {"divergence": stats.divergence}
    assert got == pytest.approx(naive_metrics(case, config), rel=1e-9, abs=1e-12)
    added, parts = 0.0, LossStats()
    for part in (True, False):  # all tokens of a call together
        which = [t for t, call in enumerate(case["calls"]) if (call in first) == part]
        of_part, found = objective(**terms(case, which), config=config)
        added, parts = added + of_part.item(), parts + found
    assert added == pytest.approx(loss.item(), rel=1e-12, abs=1e-15)
    for field in fields(LossStats):
        expected = getattr(stats, field.name)
        assert getattr(parts, field.name) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_stats_are_numbers_even_where_ratios_overflow() -> None:
    far = {name: [-1.0] for name in ("logprobs", "old_logprobs", "reference_logprobs")}
    case = far | {"sampler_logprobs": [-2000.0], "advantages": [1.0], "weights": [1.0]}
    _, stats = objective(**terms(case | {"calls": [0]}), config=TrainConfig())
    metrics = stats.metrics()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["logprob_gap_max"] == 1999.0 and metrics["guarded_fraction"] == 1.0
    assert LossStats().metrics()["importance_ess"] == 0.0


def test_a_ratio_that_overflows_is_capped_or_taken_out() -> None:
    zero_T, far_T, call_T = torch.zeros(1), torch.tensor([-1000.0]), torch.zeros(1).long()
    kinds = ((TruncatedIS(), 2.0), (IcePop(), 0.0), (SequenceMask(), 0.0), (None, 1.0))
    for sampling, weight in kinds:
        found = importance(zero_T, far_T, call_T, sampling, None)
        assert found.weights_T.tolist() == [weight]
    guarded = importance(zero_T, far_T, call_T, TruncatedIS(), 1.25)
    assert guarded.weights_T.tolist() == [0.0]


def test_a_divergence_without_the_base_model_is_refused() -> None:
    case = {name: [-1.0] for name in ("logprobs", "old_logprobs", "sampler_logprobs")}
    bare = terms(case | {"advantages": [1.0], "weights": [1.0], "calls": [0]})
    with pytest.raises(ConfigError, match="no logprobs of the reference"):
        objective(**bare, config=TrainConfig(kl=KLPenalty(estimator="k3", coefficient=0.1)))
    loss, stats = objective(**bare, config=TrainConfig())
    assert loss.item() == -1.0 and stats.kl_reference == 0.0


@pytest.mark.soak
@settings(max_examples=count(10, 40), deadline=None)
@given(cases())
def test_the_first_update_is_the_old_policy_of_all_others(case: dict[str, list[float]]) -> None:
    config = TrainConfig(kl=KLPenalty(estimator="k3", coefficient=0.1))
    columns = terms(case)
    made = StepLoss(columns["tokens"], config)
    made.reference_logprobs_N = columns["reference_logprobs_T"]
    order = sorted(range(len(case["calls"])), key=lambda t: case["calls"][t])
    parts = [
        torch.tensor([t for t in order if case["calls"][t] == call])
        for call in sorted(set(case["calls"]), reverse=True)
    ]
    for update, name in enumerate(("old_logprobs", "logprobs")):
        made.begin_update()
        values_T = columns[f"{name}_T"]
        for places_T in parts:
            made.visit(values_T[places_T], places_T)
        expected, stats = objective(**columns | {"logprobs_T": values_T}, config=config)
        assert made.loss == pytest.approx(expected.item(), rel=1e-12, abs=1e-15)
        assert made.stats.ratio == pytest.approx(stats.ratio, rel=1e-12)
        assert made.old_logprobs_N.tolist() == case["old_logprobs"]
        if update == 0:
            assert made.stats.metrics()["ratio_mean"] == 1.0
            assert made.stats.metrics()["ratio_max_dev"] == 0.0


@pytest.mark.parametrize(
    ("given", "steps", "expected"),
    [
        ({}, range(1, 50), [1.0] * 49),
        ({"warmup_steps": 4}, range(1, 7), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({"decay_steps": 4, "final_fraction": 0.0}, range(1, 7), [0.75, 0.5, 0.25, 0.0, 0.0, 0.0]),
        ({"warmup_steps": 2, "decay_steps": 12}, (1, 2, 7, 12, 9999), [0.5, 1, 0.55, 0.1, 0.1]),
    ],
)
def test_by_hand(given: dict[str, Any], steps: Sequence[int], expected: list[float]) -> None:
    schedule = LRSchedule(**{"final_fraction": 0.1} | given)
    found = [learning_rate(1e-3, schedule, step) for step in steps]
    assert found == pytest.approx([1e-3 * share for share in expected], rel=1e-12)


def test_the_bound_grows_by_itself_with_every_version() -> None:
    check_sync({"logprob_gap_mean": 0.29, "logprob_gap_max": 0.5}, 0.1, staleness=2.0)
    with pytest.raises(ArtError, match=r"0\.31 nats apart per token.*at most 0\.3.*staleness 2"):
        check_sync({"logprob_gap_mean": 0.31, "logprob_gap_max": 0.5}, 0.1, staleness=2.0)


def test_calls_of_one_token_have_no_neighbours() -> None:
    own_T = -3 * torch.rand(12)
    given = own_T, own_T + 1, {0.5: own_T * 2}, own_T.roll(1), torch.arange(12), [1.0]
    assert [one.left for one in suspects_of(*given) if "shifted" in one.fault] == [math.inf]
