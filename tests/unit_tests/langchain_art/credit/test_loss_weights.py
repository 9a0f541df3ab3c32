from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.credit.loss_weights import call_weights
from langchain_art.wire import Aggregation, ConstantAggregation

CALLS = [("a", 1), ("a", 3), ("b", 4)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token", [1 / 8, 1 / 8, 1 / 8]),
        ("sequence", [1 / 3, 1 / 9, 1 / 12]),
        ("run", [1 / 8, 1 / 8, 1 / 8]),
        (ConstantAggregation(value=50), [1 / 50, 1 / 50, 1 / 50]),
    ],
)
def test_vectors(kind: Aggregation, expected: list[float]) -> None:
    assert call_weights(CALLS, kind) == pytest.approx(expected)
    assert call_weights([], kind) == []


def test_a_run_with_more_calls_and_tokens_weighs_no_more() -> None:
    weights = call_weights([("a", 1), ("a", 3), ("a", 6), ("b", 2)], "run")
    assert weights == pytest.approx([1 / 20, 1 / 20, 1 / 20, 1 / 4])


@given(st.integers(0, 2**32), st.sampled_from(["token", "sequence", "run"]))
def test_the_weighed_sum_is_the_mean_of_means(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    calls = [(rng.randrange(3), rng.randrange(1, 6)) for _ in range(rng.randrange(1, 8))]
    losses = [[rng.gauss(0, 1) for _ in range(tokens)] for _, tokens in calls]
    units = {
        "token": [[loss] for losses_T in losses for loss in losses_T],
        "sequence": losses,
        "run": [
            [
                loss
                for (run, _), losses_T in zip(calls, losses, strict=True)
                if run == one
                for loss in losses_T
            ]
            for one in {run for run, _ in calls}
        ],
    }[kind]
    expected = math.fsum(math.fsum(unit) / len(unit) for unit in units) / len(units)
    weights = call_weights(calls, kind)
    got = math.fsum(weight * math.fsum(row) for weight, row in zip(weights, losses, strict=True))
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)
