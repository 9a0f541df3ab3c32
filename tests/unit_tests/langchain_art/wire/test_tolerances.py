"""`wire.tolerances`: what rounding explains, by dtype."""

from __future__ import annotations

import pytest

from langchain_art.wire.tolerances import logprob_tolerance


@pytest.mark.parametrize(
    ("dtype", "nats", "doubled"),
    [
        ("float64", 0.0001, 0.0001),
        ("float32", 0.0001, 0.0001),
        ("bfloat16", 0.05, 0.1),
        ("float16", 0.05, 0.1),
    ],
)
def test_half_precision_rounds_coarsely(dtype: str, nats: float, doubled: float) -> None:
    assert logprob_tolerance(dtype) == nats
    assert logprob_tolerance(dtype, half_factor=2.0) == pytest.approx(doubled)
