import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from langchain_art.wire import IcePop, SequenceMask, TruncatedIS
from langchain_art_server.algorithms.loss.importance_sampling import importance
from langchain_art_server.algorithms.loss.token_losses import call_means, call_sums
from tests.support.naive_losses import naive_importance

torch.set_num_threads(1)
F64 = torch.float64


KINDS: dict[str, Any] = {
    "truncated": TruncatedIS(),
    "icepop": IcePop(),
    "sequence_mask": SequenceMask(),
    "sequence_mask from 0.5": SequenceMask(low=0.5),
    "off": None,
}


def test_a_ratio_that_overflows_is_capped_or_taken_out() -> None:
    zero_T, far_T = torch.zeros(1), torch.tensor([-1000.0])
    for kind, weight in (("truncated", 2.0), ("icepop", 0.0), ("sequence_mask", 0.0), ("off", 1.0)):
        one_T = torch.zeros(1, dtype=torch.long)
        found = importance(zero_T, far_T, one_T, KINDS[kind], None)
        assert found.weights_T.tolist() == [weight]
        guarded = importance(zero_T, far_T, one_T, TruncatedIS(), 1.25)
        assert guarded.weights_T.tolist() == [0.0]


def test_the_weights_carry_no_gradient() -> None:
    old_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = importance(old_T, old_T.detach(), torch.tensor([0, 1]), TruncatedIS(), 1.25)
    assert not found.weights_T.requires_grad and found.weights_T.tolist() == [1.0, 1.0]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(KINDS)))
def test_against_loops(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    tokens = rng.randrange(1, 9)
    calls = [rng.randrange(3) for _ in range(tokens)]
    logs = [rng.gauss(0, rng.choice([0.01, 0.5, 2.0])) for _ in range(tokens)]
    sampling, guard = KINDS[kind], rng.choice([None, 1.25, 2.0])
    found = importance(
        torch.tensor(logs, dtype=F64),
        torch.zeros(tokens, dtype=F64),
        torch.tensor(calls),
        sampling,
        guard,
    )
    weights, limited, guarded = zip(*naive_importance(logs, calls, sampling, guard), strict=True)
    assert found.weights_T.tolist() == pytest.approx(weights, rel=1e-9)
    assert (found.limited_T.tolist(), found.guarded_T.tolist()) == ([*limited], [*guarded])


def test_sums_and_means_by_call_and_their_gradient() -> None:
    values_T = torch.tensor([1.0, 3.0, 5.0, 7.0], requires_grad=True)
    calls_T = torch.tensor([7, 7, 4, 7])
    assert call_sums(values_T, calls_T).tolist() == [11.0, 11.0, 5.0, 11.0]
    means_T = call_means(values_T, calls_T)
    assert means_T.tolist() == pytest.approx([11 / 3, 11 / 3, 5.0, 11 / 3])
    weights_T = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    (gradient_T,) = torch.autograd.grad((means_T * weights_T).sum(), values_T)
    assert gradient_T.tolist() == pytest.approx([337.0, 337.0, 100.0, 337.0])
    empty_T: Tensor = torch.zeros(0)
    assert call_means(empty_T, torch.zeros(0, dtype=torch.long)).shape == (0,)
