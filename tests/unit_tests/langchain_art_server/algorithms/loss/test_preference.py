"""DPO's loss and gradient, against autograd in float64 on the loss as the paper writes it."""

import math

import pytest

from langchain_art_server.jobs.sft_records import PairLogprobs, preference_weights


def test_far_margins_do_not_overflow() -> None:
    certain, wrong = PairLogprobs(0.0, -1e5, -9.0, -9.0), PairLogprobs(-1e5, 0.0, -9.0, -9.0)
    found = preference_weights([certain], 1.0)
    assert (found.loss, found.weights) == (0.0, [0.0])
    found = preference_weights([wrong], 1.0)
    assert (found.loss, found.weights) == (1e5, [1.0])


def test_an_untrained_policy_is_undecided() -> None:
    found = preference_weights([PairLogprobs(-5.0, -7.0, -5.0, -7.0)] * 2, 0.1)
    assert found.loss == pytest.approx(math.log(2))
    assert found.weights == [0.025, 0.025]
    assert found.metrics["preference_order"] == 1.0
    assert found.metrics["preference_accuracy"] == 0.0
