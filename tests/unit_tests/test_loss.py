"""The loss against a twin in plain Python: float64, one token at a time, no vectorisation."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from langchain_art_server.algorithms import loss as loss_module
from langchain_art_server.algorithms.loss import (
    LossStats,
    clipped_loss,
    loss_stats,
    token_logprobs,
)

torch.set_num_threads(1)


def naive_logprob(logits_V: list[float], target: int, temperature: float) -> float:
    z_V = [x / temperature for x in logits_V]
    top = max(z_V)
    return z_V[target] - top - math.log(math.fsum(math.exp(z - top) for z in z_V))


def naive_loss_and_gradient(
    case: dict[str, Any],
) -> tuple[float, list[list[float]]]:
    """-(1/N) Σ min(rA, clip(r)A) and its gradient with respect to every logit, by hand."""
    n, low, high = case["denominator"], case["clip_low"], case["clip_high"]
    total, gradient_TV = 0.0, []
    for t, logits_V in enumerate(case["logits"]):
        target, temperature = case["targets"][t], case["temperatures"][t]
        row_V = [0.0] * len(logits_V)
        gradient_TV.append(row_V)
        if not case["mask"][t]:
            continue
        new = naive_logprob(logits_V, target, temperature)
        ratio, a = math.exp(new - case["sampler"][t]), case["advantages"][t]
        clipped = min(max(ratio, 1 - low), 1 + high)
        total -= min(ratio * a, clipped * a) / n
        if clipped * a < ratio * a:
            continue  # the clip holds: no gradient
        for v in range(len(logits_V)):
            p = math.exp(naive_logprob(logits_V, v, temperature))
            row_V[v] = -a * ratio / n * ((v == target) - p) / temperature
    return total, gradient_TV


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    tokens, vocab = draw(st.integers(1, 7)), draw(st.integers(2, 9))
    spread = draw(st.sampled_from([0.1, 1.0, 10.0]))
    logits = [[rng.gauss(0, spread) for _ in range(vocab)] for _ in range(tokens)]
    targets = [rng.randrange(vocab) for _ in range(tokens)]
    temperatures = [rng.choice([0.3, 0.7, 1.0, 1.5]) for _ in range(tokens)]
    drift = draw(st.sampled_from([0.0, 0.05, 0.5, 2.0]))
    return {
        "logits": logits,
        "targets": targets,
        "temperatures": temperatures,
        "sampler": [
            naive_logprob(logits[t], targets[t], temperatures[t]) + rng.gauss(0, drift)
            for t in range(tokens)
        ],
        "advantages": [rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 3)]) for _ in range(tokens)],
        "mask": [rng.random() < 0.8 for _ in range(tokens)],
        "clip_low": draw(st.sampled_from([0.1, 0.2, 0.5])),
        "clip_high": draw(st.sampled_from([0.1, 0.28, 3.0])),
        "denominator": draw(st.integers(1, 1000)),
    }


def run(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    logits_TV = torch.tensor(case["logits"], dtype=dtype, requires_grad=True)
    logprobs_T = token_logprobs(
        logits_TV, torch.tensor(case["targets"]), torch.tensor(case["temperatures"], dtype=dtype)
    )
    value = clipped_loss(
        logprobs_T,
        torch.tensor(case["sampler"], dtype=dtype),
        torch.tensor(case["advantages"], dtype=dtype),
        torch.tensor(case["mask"]),
        case["clip_low"],
        case["clip_high"],
        case["denominator"],
    )
    value.backward()
    assert logits_TV.grad is not None
    return value.detach(), logits_TV.grad


def largest_factor(case: dict[str, Any]) -> float:
    """The largest |r A| / (N T): what 1[v = target] - p_v, a difference near 0 or not, scales."""
    return max(
        math.exp(naive_logprob(logits_V, case["targets"][t], temperature) - case["sampler"][t])
        * abs(case["advantages"][t])
        / (case["denominator"] * temperature)
        for t, (logits_V, temperature) in enumerate(
            zip(case["logits"], case["temperatures"], strict=True)
        )
    )


@settings(max_examples=300, deadline=None)
@given(cases(), st.sampled_from([1, 3, 1 << 24]))
def test_loss_and_gradient_equal_the_naive_twin(case: dict[str, Any], chunk: int) -> None:
    value, gradient_TV = naive_loss_and_gradient(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "CHUNK_ELEMENTS", chunk)
        got, got_TV = run(case)
    assert got.item() == pytest.approx(value, rel=1e-9, abs=1e-15)
    error = (got_TV - torch.tensor(gradient_TV, dtype=torch.float64)).abs().max().item()
    assert error <= 1e-9 * largest_factor(case)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_low_precision_logits_get_a_gradient_of_their_own_dtype(case: dict[str, Any]) -> None:
    logits_TV = torch.tensor(case["logits"], dtype=torch.bfloat16, requires_grad=True)
    logprobs_T = token_logprobs(logits_TV, torch.tensor(case["targets"]), 0.7)
    assert logprobs_T.dtype == torch.float32
    expected_T = (logits_TV.detach().double() / 0.7).log_softmax(-1)
    expected_T = expected_T.gather(-1, torch.tensor(case["targets"])[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs_T.detach().double(), expected_T, rtol=1e-5, atol=1e-5)
    logprobs_T.sum().backward()
    assert logits_TV.grad is not None and logits_TV.grad.dtype == torch.bfloat16


def test_logprobs_agree_with_log_softmax_for_a_float_and_a_tensor_temperature() -> None:
    logits_TV = torch.randn(5, 11, generator=torch.Generator().manual_seed(1))
    targets_T = torch.arange(5)
    plain_T = token_logprobs(logits_TV, targets_T, 0.5)
    torch.testing.assert_close(plain_T, (logits_TV * 2).log_softmax(-1)[range(5), range(5)])
    assert torch.equal(plain_T, token_logprobs(logits_TV, targets_T, torch.full((5,), 0.5)))
    assert token_logprobs(logits_TV[:0], targets_T[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("ratio", "advantage", "ppo", "dapo", "has_gradient"),
    [
        (1.5, 1.0, -1.2, -1.28, False),
        (1.5, -1.0, 1.5, 1.5, True),
        (0.5, 1.0, -0.5, -0.5, True),
        (0.5, -1.0, 0.8, 0.8, False),
        (5.0, -1.0, 5.0, 5.0, True),
        (1.0, 2.0, -2.0, -2.0, True),
    ],
)
def test_vectors(
    ratio: float, advantage: float, ppo: float, dapo: float, has_gradient: bool
) -> None:
    for high, expected in ((0.2, ppo), (0.28, dapo)):
        new_T = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        old_T, a_T = torch.zeros(1, dtype=torch.float64), torch.tensor([advantage])
        value = clipped_loss(new_T, old_T, a_T, torch.ones(1), 0.2, high, 1)
        value.backward()
        assert value.item() == pytest.approx(expected, rel=1e-12)
        # d(-rA)/d logprob = -rA where the clip does not hold
        gradient = -ratio * advantage if has_gradient else 0.0
        assert new_T.grad is not None
        assert new_T.grad.item() == pytest.approx(gradient, rel=1e-12)


def split(case: dict[str, Any], part: slice) -> dict[str, Any]:
    return {k: v[part] if isinstance(v, list) else v for k, v in case.items()}


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 7))
def test_the_losses_of_micro_batches_add_up(case: dict[str, Any], cut: int) -> None:
    whole, whole_TV = run(case)
    parts = [run(split(case, p)) for p in (slice(0, cut), slice(cut, None)) if case["targets"][p]]
    assert sum(p[0].item() for p in parts) == pytest.approx(whole.item(), rel=1e-12, abs=1e-15)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), whole_TV, rtol=1e-12, atol=1e-15)


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 7))
def test_stats_equal_loops_and_add_up(case: dict[str, Any], cut: int) -> None:
    def stats(part: dict[str, Any]) -> LossStats:
        with torch.no_grad():
            new_T = token_logprobs(
                torch.tensor(part["logits"], dtype=torch.float64).reshape(
                    -1, len(case["logits"][0])
                ),
                torch.tensor(part["targets"], dtype=torch.long),
                torch.tensor(part["temperatures"], dtype=torch.float64),
            )
        old_T = torch.tensor(part["sampler"], dtype=torch.float64)
        a_T = torch.tensor(part["advantages"], dtype=torch.float64)
        mask_T = torch.tensor(part["mask"], dtype=torch.bool)
        return loss_stats(new_T, old_T, a_T, mask_T, case["clip_low"], case["clip_high"])

    got = (stats(split(case, slice(0, cut))) + stats(split(case, slice(cut, None)))).metrics()
    gaps, low, high = [], 0, 0
    for t, kept in enumerate(case["mask"]):
        if kept:
            new = naive_logprob(case["logits"][t], case["targets"][t], case["temperatures"][t])
            gaps.append(new - case["sampler"][t])
            ratio, a = math.exp(gaps[-1]), case["advantages"][t]
            low += a < 0 and ratio < 1 - case["clip_low"]
            high += a > 0 and ratio > 1 + case["clip_high"]
    n, ratios = max(1, len(gaps)), [math.exp(g) for g in gaps]
    expected = {
        "ratio_mean": math.fsum(ratios) / n,
        "ratio_max_dev": max((abs(r - 1) for r in ratios), default=0.0),
        "clip_low_fraction": low / n,
        "clip_high_fraction": high / n,
        "logprob_gap_mean": math.fsum(map(abs, gaps)) / n,
        "logprob_gap_max": max(map(abs, gaps), default=0.0),
        "kl": math.fsum(math.expm1(g) - g for g in gaps) / n,
    }
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert got["kl"] >= 0


def test_k3_vector() -> None:
    # log sampler - log learner = .1, r = e^-.1: r - 1 - log r = .00484; the other way, .00517.
    one_T = torch.ones(1, dtype=torch.float64)
    for gap, k3 in ((-0.1, 0.004837), (0.1, 0.005171)):
        stats = loss_stats(one_T * (gap - 1), -one_T, one_T, one_T, 0.2, 0.28)
        assert stats.kl == pytest.approx(k3, abs=1e-6)


def test_what_is_masked_out_may_be_anything() -> None:
    new_T = torch.tensor([-1.0, math.nan, -2.0, -3.0], requires_grad=True)
    old_T = torch.tensor([-1.0, -1.0, -math.inf, -1e30])
    a_T = torch.tensor([1.0, math.nan, 1.0, math.inf])
    value = clipped_loss(new_T, old_T, a_T, torch.tensor([1, 0, 0, 0]), 0.2, 0.28, 2)
    value.backward()
    assert value.item() == -0.5
    assert new_T.grad is not None and new_T.grad.tolist() == [-0.5, 0.0, 0.0, 0.0]


def test_zero_advantages_give_exactly_no_gradient() -> None:
    new_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    old_T, zero_T = torch.tensor([-1.5, -9.0]), torch.zeros(2)
    clipped_loss(new_T, old_T, zero_T, torch.ones(2), 0.2, 0.28, 2).backward()
    assert new_T.grad is not None and new_T.grad.tolist() == [0.0, 0.0]


def test_only_the_logits_are_kept_for_the_backward_pass() -> None:
    kept: list[tuple[int, ...]] = []
    logits_TV = torch.randn(6, 100, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() != logits_TV.data_ptr():
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        token_logprobs(logits_TV, torch.arange(6), 0.9)
    assert kept and all(shape == (6,) for shape in kept)
