from __future__ import annotations

import math

import pytest
import torch

from langchain_art_server.algorithms.loss.token_losses import kl_penalty

torch.set_num_threads(1)
F64 = torch.float64


@pytest.mark.parametrize(("kind", "value"), [("k1", -0.1), ("k2", 0.005), ("k3", 0.00517)])
def test_vectors(kind: str, value: float) -> None:
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


def test_the_plain_estimators_have_other_gradients() -> None:
    # Why they are not used as they are: the gradient of k1 averages to 0, that of k3 to the one
    # of KL(base ‖ π).
    draw = torch.Generator().manual_seed(2)
    logits_V = torch.randn(6, generator=draw, dtype=F64).requires_grad_()
    base_V = torch.randn(6, generator=draw, dtype=F64).log_softmax(0)
    policy_V = logits_V.log_softmax(0)
    p_V, d_V = policy_V.detach().exp(), policy_V - base_V
    (k1_V,) = torch.autograd.grad((p_V * d_V).sum(), logits_V, retain_graph=True)
    assert k1_V.abs().max() < 1e-12
    (k3_V,) = torch.autograd.grad((p_V * ((-d_V).expm1() + d_V)).sum(), logits_V, retain_graph=True)
    (reverse_V,) = torch.autograd.grad(-(base_V.exp() * policy_V).sum(), logits_V)
    torch.testing.assert_close(k3_V, reverse_V, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradients_of_single_tokens(kind: str) -> None:
    # r (d + 1), r d, r d
    policy_T = torch.tensor([-0.5, -3.0], dtype=F64, requires_grad=True)
    base_T = torch.tensor([-1.0, -2.0], dtype=F64)
    old_T = torch.tensor([-0.7, -3.0], dtype=F64)
    kl_penalty(policy_T, base_T, old_T, kind).sum().backward()
    ratios, gaps = [math.exp(0.2), 1.0], [0.5, -1.0]
    more = 1.0 if kind == "k1" else 0.0
    expected = [r * (d + more) for r, d in zip(ratios, gaps, strict=True)]
    assert policy_T.grad is not None and policy_T.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_at_the_base_there_is_no_penalty(kind: str) -> None:
    policy_T = torch.tensor([-0.5, -3.0], requires_grad=True)
    penalty_T = kl_penalty(policy_T, policy_T.detach(), policy_T.detach(), kind)
    assert penalty_T.tolist() == [0.0, 0.0]
    if kind != "k1":
        penalty_T.sum().backward()
        assert policy_T.grad is not None and policy_T.grad.tolist() == [0.0, 0.0]
