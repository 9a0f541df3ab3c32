"""When a fit whose held-out reward gains nothing more stops early."""

from __future__ import annotations

import pytest

from langchain_art.training.collapse.recovery import no_gain
from langchain_art.training.results.records import EvalResult


def held_out(step: int, mean: float | None, ci95: float | None = 0.06) -> EvalResult:
    return EvalResult(step=step, versions=(f"p@{step}",), mean=mean, ci95=ci95, n=100)


@pytest.mark.parametrize(
    ("means", "patience", "stops"),
    [
        ([0.3, 0.5, 0.52, 0.53], 2, True),
        ([0.3, 0.5, 0.52, 0.53], 3, False),
        ([0.3, 0.5, 0.55, 0.6], 2, False),  # small gains add up: 0.6 is above 0.5 + 0.085
        ([0.3, 0.32, 0.29], 2, True),
        ([0.3, 0.32], 2, False),
        ([0.3, 0.9, 0.1, 0.1], 2, True),
        ([0.3], 1, False),
        ([], 1, False),
    ],
)
def test_when_a_fit_has_gained_enough(means: list[float], patience: int, stops: bool) -> None:
    found = no_gain([held_out(step, mean) for step, mean in enumerate(means)], patience)
    assert (found is not None) is stops
    if found:
        assert f"stop_early={patience}" in found


def test_an_evaluation_without_an_interval_is_no_gain_and_no_loss() -> None:
    evals = [held_out(0, 0.3), held_out(1, None, None), held_out(2, 0.31, None)]
    assert no_gain(evals, 1) is None
