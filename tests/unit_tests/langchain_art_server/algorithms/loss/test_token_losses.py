"""The losses against twins in plain Python: float64, one token at a time, no vectorisation."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from langchain_art_server.algorithms.loss import token_losses as loss_module
from langchain_art_server.algorithms.loss.token_losses import (
    TokenLoss,
    cispo_loss,
    clip_loss,
    dppo_tv_loss,
    entropy_penalty,
    gspo_loss,
    kl_penalty,
    token_logprobs,
)
from tests.support.naive_losses import naive_losses
from tests.support.soak import count

torch.set_num_threads(1)
F64 = torch.float64


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    tokens = draw(st.integers(1, 9))
    drift = draw(st.sampled_from([0.0, 0.05, 0.5, 2.0]))
    new = [-rng.uniform(0.01, 4) for _ in range(tokens)]
    return {
        "new": new,
        "old": [min(-1e-3, x + rng.gauss(0, drift)) for x in new],
        "advantages": [rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 3)]) for _ in range(tokens)],
        "calls": [rng.choice([3, 7, 8]) for _ in range(tokens)],
        "low": draw(st.sampled_from([0.1, 0.2, 0.5])),
        "high": draw(st.sampled_from([0.1, 0.28, 3.0])),
        "dual": draw(st.sampled_from([None, 1.5, 3.0])),
    }


LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "clip": lambda new, old, a, calls, low, high, dual: clip_loss(new, old, a, low, high, dual),
    "gspo": lambda new, old, a, calls, low, high, dual: gspo_loss(new, old, a, calls, low, high),
    "cispo": lambda new, old, a, calls, low, high, dual: cispo_loss(new, old, a, low, high),
    "dppo_tv": lambda new, old, a, calls, low, high, dual: dppo_tv_loss(new, old, a, low, high),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=count(50, 150), deadline=None)
@given(cases())
def test_losses_and_gradients_equal_their_naive_twins(name: str, case: dict[str, Any]) -> None:
    new_T, old_T, a_T = (torch.tensor(case[key], dtype=F64) for key in ("new", "old", "advantages"))
    new_T.requires_grad_()
    bounds = (case["low"], min(case["high"], 0.9) if name == "dppo_tv" else case["high"])
    found = LOSSES[name](new_T, old_T, a_T, torch.tensor(case["calls"]), *bounds, case["dual"])
    rows = (case[key] for key in ("new", "old", "advantages", "calls"))
    naive = naive_losses(name, *rows, *bounds, case["dual"])
    assert found.loss_T.tolist() == pytest.approx([n[0] for n in naive], rel=1e-9, abs=1e-12)
    assert found.low_T.tolist() == [n[2] == "low" for n in naive]
    assert found.high_T.tolist() == [n[2] == "high" for n in naive]
    found.loss_T.sum().backward()
    slopes = [n[1] for n in naive]
    if name == "gspo":  # a call's ratio moves with the mean of its tokens
        slopes = [
            math.fsum(slopes[k] for k, other in enumerate(case["calls"]) if other == call)
            / case["calls"].count(call)
            for call in case["calls"]
        ]
    assert new_T.grad is not None
    assert new_T.grad.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "ppo", "dapo", "dual", "has_gradient"),
    [
        (1.5, 1.0, -1.2, -1.28, -1.28, False),
        (1.5, -1.0, 1.5, 1.5, 1.5, True),
        (0.5, 1.0, -0.5, -0.5, -0.5, True),
        (0.5, -1.0, 0.8, 0.8, 0.8, False),
        (5.0, -1.0, 5.0, 5.0, 3.0, True),
        (5.0, 1.0, -1.2, -1.28, -1.28, False),
        (1.0, 2.0, -2.0, -2.0, -2.0, True),
    ],
)
def test_vectors_of_the_clipped_loss(
    ratio: float, advantage: float, ppo: float, dapo: float, dual: float, has_gradient: bool
) -> None:
    for high, cap, expected in ((0.2, None, ppo), (0.28, None, dapo), (0.28, 3.0, dual)):
        new_T = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        old_T, a_T = torch.zeros(1, dtype=torch.float64), torch.tensor([advantage])
        found = clip_loss(new_T, old_T, a_T, 0.2, high, cap)
        found.loss_T.backward()
        assert found.loss_T.item() == pytest.approx(expected, rel=1e-12)
        # d(-rA)/d logprob = -rA where no bound holds
        free = has_gradient and not (cap is not None and ratio == 5.0)
        assert new_T.grad is not None
        assert new_T.grad.item() == pytest.approx(-ratio * advantage if free else 0.0, rel=1e-12)


@pytest.mark.parametrize(
    ("learner", "sampler", "advantage", "kept"),
    [
        (0.9, 0.6, 1.0, False),
        (0.02, 0.001, 1.0, True),
        (0.3, 0.6, -1.0, False),
        (0.3, 0.6, 1, True),
    ],
)
def test_vectors_of_dppo(learner: float, sampler: float, advantage: float, kept: bool) -> None:
    new_T = torch.tensor([math.log(learner)], dtype=torch.float64, requires_grad=True)
    old_T = torch.tensor([math.log(sampler)], dtype=torch.float64)
    found = dppo_tv_loss(new_T, old_T, torch.tensor([advantage]), 0.2, 0.2)
    ratio = learner / sampler
    expected = -ratio * advantage * kept + 1e-3 * math.log(ratio) ** 2
    assert found.loss_T.item() == pytest.approx(expected, rel=1e-12)
    assert (found.low_T.item(), found.high_T.item()) == (
        not kept and advantage < 0,
        not kept and advantage > 0,
    )


def test_vectors_of_gspo_and_cispo() -> None:
    # Ratios e^.3 and e^-.1: the call's is e^.1.
    new_T = torch.tensor([0.3, -0.1, 0.9], dtype=torch.float64)
    zero_T, one_T = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    calls_T = torch.tensor([5, 5, 2])
    found = gspo_loss(new_T, zero_T, one_T, calls_T, 0.2, 0.5)
    assert found.loss_T.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.1), -1.5])
    assert found.high_T.tolist() == [False, False, True]
    # The weight is at most 5; the logprob's gradient stays.
    steep_T = torch.tensor([-1.0], requires_grad=True)
    capped = cispo_loss(steep_T, torch.tensor([-4.0]), torch.ones(1), 1.0, 4.0)
    capped.loss_T.backward()
    assert capped.loss_T.item() == 5.0 and steep_T.grad is not None and steep_T.grad.item() == -5.0


def test_a_ratio_that_overflows_leaves_a_dropped_token_without_gradient() -> None:
    new_T = torch.tensor([-0.1, -1.0], requires_grad=True)
    found = dppo_tv_loss(new_T, torch.tensor([-500.0, -1.0]), torch.ones(2), 0.2, 0.2)
    found.loss_T.sum().backward()
    assert found.high_T.tolist() == [True, False]
    assert new_T.grad is not None and torch.isfinite(new_T.grad).all()


# --- logprobs -----------------------------------------------------------------------------------


def naive_logprob(
    logits_V: list[float], target: int, temperature: float, allowed: set[int]
) -> float:
    if target not in allowed:
        return -math.inf
    z_V = [x / temperature for x in logits_V]
    top = max(z_V[v] for v in allowed)
    return z_V[target] - top - math.log(math.fsum(math.exp(z_V[v] - top) for v in allowed))


@st.composite
def logits_cases(draw: st.DrawFn) -> dict[str, Any]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    tokens, vocab = draw(st.integers(1, 7)), draw(st.integers(2, 9))
    spread = draw(st.sampled_from([0.1, 1.0, 10.0]))
    targets = [rng.randrange(vocab) for _ in range(tokens)]
    return {
        "logits": [[rng.gauss(0, spread) for _ in range(vocab)] for _ in range(tokens)],
        "targets": targets,
        "allowed": [{t, *rng.sample(range(vocab), rng.randrange(vocab + 1))} for t in targets],
        "temperatures": [rng.choice([0.3, 0.7, 1.0, 1.5]) for _ in range(tokens)],
        "weights": [rng.gauss(0, 1) for _ in range(tokens)],
    }


@pytest.mark.soak
@settings(max_examples=count(60, 200), deadline=None)
@given(logits_cases(), st.sampled_from([1, 3, 1 << 24]), st.booleans())
def test_logprobs_and_their_gradient_equal_the_naive_twin(
    case: dict[str, Any], chunk: int, whole: bool
) -> None:
    logits_TV = torch.tensor(case["logits"], dtype=torch.float64, requires_grad=True)
    targets_T = torch.tensor(case["targets"])
    temperature_T = torch.tensor(case["temperatures"], dtype=torch.float64)
    weights_T = torch.tensor(case["weights"], dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "CHUNK_ELEMENTS", chunk)

        def forbidden(part: slice, size: int) -> np.ndarray:
            return np.array([[v not in one for v in range(size)] for one in case["allowed"][part]])

        left = None if whole else forbidden
        got_T = token_logprobs(logits_TV, targets_T, temperature_T, left)
        (got_T * weights_T).sum().backward()
    everything = [set(range(len(logits_V))) for logits_V in case["logits"]]
    allowed = everything if whole else case["allowed"]
    rows = list(zip(case["logits"], case["targets"], case["temperatures"], allowed, strict=True))
    expected = [naive_logprob(*row) for row in rows]
    assert got_T.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    gradient_TV = [
        [
            weight * ((v == target) - math.exp(naive_logprob(logits_V, v, heat, some))) / heat
            for v in range(len(logits_V))
        ]
        for (logits_V, target, heat, some), weight in zip(rows, case["weights"], strict=True)
    ]
    assert logits_TV.grad is not None
    for at, some in enumerate(allowed):
        if len(some) == 1:  # a forced token
            assert got_T[at] == 0.0 and not logits_TV.grad[at].any()
    error = (logits_TV.grad - torch.tensor(gradient_TV, dtype=torch.float64)).abs().max().item()
    assert error <= 1e-9 * max(1.0, *(abs(w) / 0.3 for w in case["weights"]))


@settings(max_examples=50, deadline=None)
@given(logits_cases())
def test_low_precision_logits_get_a_gradient_of_their_own_dtype(case: dict[str, Any]) -> None:
    logits_TV = torch.tensor(case["logits"], dtype=torch.bfloat16, requires_grad=True)
    logprobs_T = token_logprobs(logits_TV, torch.tensor(case["targets"]), 0.7)
    assert logprobs_T.dtype == torch.float32
    expected_T = (logits_TV.detach().double() / 0.7).log_softmax(-1)
    expected_T = expected_T.gather(-1, torch.tensor(case["targets"])[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs_T.detach().double(), expected_T, rtol=1e-5, atol=1e-5)
    logprobs_T.sum().backward()
    assert logits_TV.grad is not None and logits_TV.grad.dtype == torch.bfloat16


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


@pytest.mark.parametrize(("kind", "value"), [("k1", -0.1), ("k2", 0.005), ("k3", 0.00517)])
def test_kl_vectors(kind: str, value: float) -> None:
    # log base - log π = .1, before the policy has moved
    policy_T = torch.tensor([-1.0], dtype=F64)
    got = kl_penalty(policy_T, policy_T + 0.1, policy_T, kind).item()
    assert got == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("moved", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_on_average_the_gradient_is_that_of_the_divergence(kind: str, moved: float) -> None:
    # The average over tokens drawn from π_old, exactly: each token of a vocabulary of 6, weighed
    # by its probability. π may have moved away from π_old.
    draw = torch.Generator().manual_seed(2)
    logits_V = torch.randn(6, generator=draw, dtype=F64)
    base_V = torch.randn(6, generator=draw, dtype=F64).log_softmax(0)
    old_V = (logits_V + moved * torch.randn(6, generator=draw, dtype=F64)).log_softmax(0)
    logits_V.requires_grad_()
    policy_V = logits_V.log_softmax(0)
    divergence = (policy_V.exp() * (policy_V - base_V)).sum()
    (expected_V,) = torch.autograd.grad(divergence, logits_V, retain_graph=True)
    penalty_V = kl_penalty(policy_V, base_V, old_V, kind)
    average = (old_V.exp() * penalty_V).sum()
    (got_V,) = torch.autograd.grad(average, logits_V)
    torch.testing.assert_close(got_V, expected_V, rtol=1e-10, atol=1e-12)
    if kind != "k2":
        assert average.item() == pytest.approx(divergence.item(), rel=1e-10)
    if kind != "k1":
        assert (penalty_V >= 0).all()


@pytest.mark.parametrize("moved", [0.0, 0.7])
def test_on_average_the_bonus_has_the_gradient_of_the_entropy(moved: float) -> None:
    draw = torch.Generator().manual_seed(3)
    logits_V = torch.randn(6, generator=draw, dtype=F64)
    old_V = (logits_V + moved * torch.randn(6, generator=draw, dtype=F64)).log_softmax(0)
    logits_V.requires_grad_()
    policy_V = logits_V.log_softmax(0)
    (expected_V,) = torch.autograd.grad(
        (policy_V.exp() * policy_V).sum(), logits_V, retain_graph=True
    )
    average = (old_V.exp() * entropy_penalty(policy_V, old_V)).sum()
    (got_V,) = torch.autograd.grad(average, logits_V)
    torch.testing.assert_close(got_V, expected_V, rtol=1e-10, atol=1e-12)
