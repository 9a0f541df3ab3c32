"""DPO's loss and gradient, against autograd in float64 on the loss as the paper writes it."""

import math

import pytest
import torch

from langchain_art_server.jobs.sft_records import PairLogprobs, preference_weights
from tests.support.seeds import drawn_seed


def naive(
    now_PS: torch.Tensor, base_PS: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of arXiv 2305.18290, eq. 7, of P pairs; column 0 is chosen. And its gradient."""
    now_PS = now_PS.clone().requires_grad_()
    ratio_PS = now_PS - base_PS
    loss = -torch.log(torch.sigmoid(beta * (ratio_PS[:, 0] - ratio_PS[:, 1]))).mean()
    loss.backward()
    assert now_PS.grad is not None
    return loss.detach(), now_PS.grad


@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0, 3.0])
def test_loss_and_gradient_are_the_papers(beta: float) -> None:
    torch.manual_seed(drawn_seed())
    now_PS, base_PS = -20 * torch.rand(2, 7, 2, dtype=torch.float64)
    loss, gradient_PS = naive(now_PS, base_PS, beta)
    pairs = [
        PairLogprobs(now[0], now[1], base[0], base[1])
        for now, base in zip(now_PS.tolist(), base_PS.tolist(), strict=True)
    ]
    weights, metrics = preference_weights(pairs, beta)
    assert metrics["preference_loss"] == pytest.approx(loss.item(), abs=1e-9)
    # The step descends along Σ weight (-logprob), with -weight for the rejected one.
    assert [-weight for weight in weights] == pytest.approx(gradient_PS[:, 0], abs=1e-9)
    assert weights == pytest.approx(gradient_PS[:, 1], abs=1e-9)
    margins = [pair.margin(beta) for pair in pairs]
    assert metrics["preference_accuracy"] == sum(m > 0 for m in margins) / 7


def test_far_margins_do_not_overflow() -> None:
    certain, wrong = PairLogprobs(0.0, -1e5, -9.0, -9.0), PairLogprobs(-1e5, 0.0, -9.0, -9.0)
    weights, metrics = preference_weights([certain], 1.0)
    assert (metrics["preference_loss"], weights) == (0.0, [0.0])
    weights, metrics = preference_weights([wrong], 1.0)
    assert (metrics["preference_loss"], weights) == (1e5, [1.0])


def test_an_untrained_policy_is_undecided() -> None:
    weights, metrics = preference_weights([PairLogprobs(-5.0, -7.0, -5.0, -7.0)] * 2, 0.1)
    assert metrics["preference_loss"] == pytest.approx(math.log(2))
    assert weights == [0.025, 0.025]
    assert metrics["preference_order"] == 1.0
    assert metrics["preference_accuracy"] == 0.0
