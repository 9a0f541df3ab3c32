from __future__ import annotations

import pytest

from langchain_art.credit.advantages import has_zero_variance
from langchain_art.credit.batch_plan import overlong_penalty


@pytest.mark.parametrize(
    ("values", "tolerance", "zero"),
    [
        ([], 1e-6, True),
        ([0.5], 1e-6, True),
        ([0.5, 0.5 + 0.9e-6], 1e-6, True),
        ([0.5, 0.5 + 1.1e-6], 1e-6, False),
        ([0.5, 0.5, 0.6], 1e-6, False),
        ([0.5, 0.6], 0.2, True),
    ],
)
def test_the_tolerance_is_an_edge(values: list[float], tolerance: float, zero: bool) -> None:
    assert has_zero_variance(values, tolerance) == zero


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0), (12288, 0), (13312, -0.25), (14336, -0.5), (16384, -1), (99999, -1)],
)
def test_long_runs_lose_up_to_1(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, 16384, 4096) == penalty
