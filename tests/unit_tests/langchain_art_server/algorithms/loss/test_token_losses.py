"""Published vectors of the losses; logprobs against a twin in plain Python, in float64."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from langchain_art_server.algorithms.loss import token_losses as loss_module
from langchain_art_server.algorithms.loss.token_losses import (
    clip_loss,
    dppo_tv_loss,
    entropy_penalty,
    kl_penalty,
    token_logprobs,
)
from tests.support.soak import count

torch.set_num_threads(1)
F64 = torch.float64


@pytest.mark.parametrize(
    ("ratio", "advantage", "high", "cap", "loss", "slope"),
    [
        (1.5, 1.0, 0.2, None, -1.2, 0.0),
        (1.5, 1.0, 0.28, 3.0, -1.28, 0.0),
        (1.5, -1.0, 0.28, 3.0, 1.5, 1.5),
        (0.5, 1.0, 0.28, 3.0, -0.5, -0.5),
        (0.5, -1.0, 0.28, None, 0.8, 0.0),
        (5.0, -1.0, 0.28, None, 5.0, 5.0),
        (5.0, -1.0, 0.28, 3.0, 3.0, 0.0),
    ],
)
def test_vectors_of_the_clipped_loss(
    ratio: float, advantage: float, high: float, cap: float | None, loss: float, slope: float
) -> None:
    """Those of PPO, of DAPO's higher clip and of the dual clip."""
    new_T = torch.tensor([math.log(ratio)], dtype=F64, requires_grad=True)
    found = clip_loss(new_T, torch.zeros(1), torch.tensor([advantage]), 0.2, high, cap)
    (gradient_T,) = torch.autograd.grad(found.loss_T.sum(), new_T)
    assert found.loss_T.item() == pytest.approx(loss, rel=1e-12)
    assert gradient_T.item() == pytest.approx(slope, rel=1e-12)


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


@pytest.mark.parametrize("moved", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "entropy"])
def test_on_average_the_gradient_is_that_of_the_divergence_or_the_entropy(
    kind: str, moved: float
) -> None:
    # The average over tokens drawn from π_old, exactly: each token of a vocabulary of 6, weighed
    # by its probability. π may have moved away from π_old.
    draw = torch.Generator().manual_seed(2)
    logits_V, base_V, noise_V = torch.randn(3, 6, generator=draw, dtype=F64)
    base_V = base_V.log_softmax(0)
    old_V = (logits_V + moved * noise_V).log_softmax(0)
    logits_V.requires_grad_()
    policy_V = logits_V.log_softmax(0)
    if kind == "entropy":
        base_V, penalty_V = torch.zeros(6), entropy_penalty(policy_V, old_V)
    else:
        penalty_V = kl_penalty(policy_V, base_V, old_V, kind)
    divergence = (policy_V.exp() * (policy_V - base_V)).sum()
    (expected_V,) = torch.autograd.grad(divergence, logits_V, retain_graph=True)
    average = (old_V.exp() * penalty_V).sum()
    (got_V,) = torch.autograd.grad(average, logits_V)
    torch.testing.assert_close(got_V, expected_V, rtol=1e-10, atol=1e-12)
    if kind in ("k1", "k3"):
        assert average.item() == pytest.approx(divergence.item(), rel=1e-10)
    if kind in ("k2", "k3"):
        assert (penalty_V >= 0).all()
