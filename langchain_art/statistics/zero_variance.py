"""Zero variance: rewards that differ too little to learn from. Pure rules for both sides.

The client replaces groups with zero variance (dynamic sampling, `training.batch.zero_variance`);
the server excludes them from a step (credit assignment, `algorithms.credit`).
"""

from __future__ import annotations

from collections.abc import Sequence


def has_zero_variance(values: Sequence[float], tolerance: float = 1e-6) -> bool:
    """True if there is nothing to learn from: fewer than two finite rewards, or all equal.

    Rewards that differ by at most `tolerance` are equal.
    """
    return len(values) < 2 or max(values) - min(values) <= tolerance


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """What is added to the reward of a long run: DAPO's soft punishment (arXiv 2503.14476, eq. 13).

    0 up to ``limit - buffer`` sampled tokens, from there linearly down to -1 at `limit` and beyond
    (``0 < buffer <= limit``). Example: with a limit of 16384 and a buffer of 4096, 12288 tokens
    give 0, 14336 give -0.5 and 16384 give -1.
    """
    return min(0.0, max(-1.0, (limit - buffer - tokens) / buffer))
