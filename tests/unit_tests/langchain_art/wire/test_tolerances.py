"""`wire.tolerances`: what rounding explains, by dtype."""

from __future__ import annotations

import pytest

from langchain_art.wire.tolerances import logprob_tolerance


@pytest.mark.parametrize(
    ("dtype", "nats"),
    [("float64", 0.0001), ("float32", 0.0001), ("bfloat16", 0.05), ("float16", 0.05)],
)
def test_half_precision_rounds_coarsely(dtype: str, nats: float) -> None:
    assert logprob_tolerance(dtype) == nats
