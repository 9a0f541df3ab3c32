"""Tolerances of two log probabilities of one token, by rounding alone."""

from __future__ import annotations

#: Nats per token between two healthy engines, or one engine asked twice. Measured with the embedded
#: pair on a CPU: 1e-6 in float32, 0.004 to 0.013 (at most 0.03) in bfloat16.
FULL_PRECISION = 1e-4
HALF_PRECISION = 0.05


def logprob_tolerance(dtype: str) -> float:
    """Nats per token that rounding explains, by dtype (torch's name) of the model's weights."""
    if dtype in ("float32", "float64"):
        return FULL_PRECISION
    return HALF_PRECISION
