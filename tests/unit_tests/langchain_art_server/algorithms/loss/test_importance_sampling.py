import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from langchain_art.wire import IcePop, ImportanceSampling, SequenceMask, TruncatedIS
from langchain_art_server.algorithms.loss.importance_sampling import Importance, importance
from langchain_art_server.algorithms.loss.token_losses import call_means, call_sums

torch.set_num_threads(1)
F64 = torch.float64


KINDS: dict[str, Any] = {
    "truncated": TruncatedIS(),
    "icepop": IcePop(),
    "sequence_mask": SequenceMask(),
    "off": None,
}


def weigh(
    ratios: list[float],
    calls: list[int] | None = None,
    sampling: ImportanceSampling | None = KINDS["truncated"],
    guard: float | None = None,
) -> Importance:
    old_T = torch.tensor(ratios, dtype=F64).log() - 1.0
    calls_T = torch.tensor(calls or list(range(len(ratios))))
    return importance(old_T, torch.full_like(old_T, -1.0), calls_T, sampling, guard)


def test_truncated_importance_sampling_caps_at_two() -> None:
    found = weigh([0.1, 1.0, 1.9, 2.1, 50.0])
    assert found.weights_T.tolist() == pytest.approx([0.1, 1.0, 1.9, 2.0, 2.0])
    assert found.limited_T.tolist() == [False, False, False, True, True]
    assert weigh([3.0], sampling=TruncatedIS(high=5.0)).weights_T.tolist() == pytest.approx([3.0])


def test_icepop_takes_out_what_is_outside_of_its_bounds() -> None:
    found = weigh([0.49, 0.51, 1.0, 4.9, 5.1], sampling=IcePop())
    assert found.weights_T.tolist() == pytest.approx([0.0, 0.51, 1.0, 4.9, 0.0])
    assert found.limited_T.tolist() == [True, False, False, False, True]


def test_a_sequence_mask_takes_the_product_over_the_call() -> None:
    ratios, calls = [2.0, 1.4, 2.0, 1.6, 0.1], [4, 4, 9, 9, 5]
    found = weigh(ratios, calls, sampling=SequenceMask())
    assert found.weights_T.tolist() == pytest.approx([2.8, 2.8, 0.0, 0.0, 0.1])
    assert found.limited_T.tolist() == [False, False, True, True, False]
    low = weigh(ratios, calls, sampling=SequenceMask(low=0.5))
    assert low.weights_T.tolist()[-1] == 0.0


def test_off_is_one_everywhere_and_the_guard_still_watches() -> None:
    found = weigh([0.1, 7.0], sampling=None)
    assert found.weights_T.tolist() == [1.0, 1.0] and not found.limited_T.any()
    watched = weigh([0.1, 7.0, 1.1], sampling=None, guard=1.25)
    assert watched.weights_T.tolist() == [0.0, 0.0, 1.0]
    assert watched.guarded_T.tolist() == [True, True, False]


def test_the_guard_looks_at_the_geometric_mean_of_a_call() -> None:
    # 3 * 1/3 is 1 on average: one call is kept. 1.5 * 1.1 is 1.28 on average: the other is not.
    found = weigh([3.0, 1 / 3, 1.5, 1.1], [1, 1, 2, 2], guard=1.25)
    assert found.weights_T.tolist() == pytest.approx([2.0, 1 / 3, 0.0, 0.0])
    assert found.guarded_T.tolist() == [False, False, True, True]
    wide = weigh([3.0, 1 / 3, 1.5, 1.1], [1, 1, 2, 2], guard=1.3)
    assert not wide.guarded_T.any()


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
@given(st.integers(0, 2**32), st.sampled_from(["truncated", "icepop", "sequence_mask", "off"]))
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
    low = getattr(sampling, "low", None) or 0.0
    high = sampling.high if sampling else math.inf
    for t in range(tokens):
        own = [log for log, call in zip(logs, calls, strict=True) if call == calls[t]]
        weight = math.exp(math.fsum(own) if kind == "sequence_mask" else logs[t])
        limited = not low <= weight <= high
        if kind == "truncated":
            weight = min(weight, high)
        elif kind == "off":
            weight = 1.0
        elif limited:
            weight = 0.0
        mean = math.exp(math.fsum(own) / len(own))
        factor = guard or math.inf
        guarded = not 1 / factor <= mean <= factor
        assert found.weights_T[t].item() == pytest.approx(0.0 if guarded else weight, rel=1e-9)
        assert (bool(found.limited_T[t]), bool(found.guarded_T[t])) == (limited, guarded)


@pytest.mark.parametrize(
    ("sigma", "below_half", "above_three", "median"),
    [(0.01, 0.37, 0.03, 0.67), (0.02, 0.69, 0.066, 0.20)],
)
def test_why_no_weight_is_a_product_over_a_long_run(
    sigma: float, below_half: float, above_three: float, median: float
) -> None:
    # A good engine: log w is normal for each token and exp(log w) is 1 on average. 8,000 tokens.
    runs, tokens = 400, 8000
    draw = torch.Generator().manual_seed(0)
    logs_T = torch.randn(runs * tokens, generator=draw) * sigma - sigma**2 / 2
    runs_T = torch.arange(runs).repeat_interleave(tokens)
    products_R = call_sums(logs_T, runs_T)[::tokens].exp()
    means_R = call_means(logs_T, runs_T)[::tokens].exp()
    assert (products_R < 0.5).double().mean().item() == pytest.approx(below_half, abs=0.06)
    assert (products_R > 3).double().mean().item() == pytest.approx(above_three, abs=0.03)
    assert products_R.median().item() == pytest.approx(median, abs=0.06)
    assert ((means_R > 0.99) & (means_R < 1.01)).all()  # the geometric mean knows no length


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
