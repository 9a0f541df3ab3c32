"""Rewards of one group of runs to advantages, and the test for zero variance. No torch.

A *pool* holds the values that are compared: one sequence for each run, most often of one value, the
run's reward. Statistics count every run once, however many values it has, so that a run of many
calls weighs no more in the mean. The caller excludes runs without a reward; values that are not
finite are refused. An advantage is given for each value, in the same order.

Index suffixes: G runs of a group, U values of one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from langchain_art.errors import InvalidRequest

#: Added to the standard deviation, as in TRL's GRPOTrainer.
STD_EPSILON = 1e-4

Values = Sequence[Sequence[float]]


def has_zero_variance(values: Sequence[float], tolerance: float = 1e-6) -> bool:
    """True if there is nothing to learn from: fewer than two finite rewards, or all equal.

    Rewards that differ by at most `tolerance` are equal.
    """
    return len(values) < 2 or max(values) - min(values) <= tolerance


def _means(values_GU: Values) -> list[float]:
    return [math.fsum(v / len(values_U) for v in values_U) for values_U in values_GU]


def _mean(values_GU: Values) -> float:
    return math.fsum(m / len(values_GU) for m in _means(values_GU))


def mean_only(values_GU: Values) -> list[list[float]]:
    """Value minus the group's mean: Dr. GRPO (arXiv 2503.20783).

    ``A_i = r_i - mean(r)``. Example: ``[1, 0, 0, 0]`` gives ``[.75, -.25, -.25, -.25]``. In
    the reward's unit; the runs' means sum to 0.
    """
    mean = _mean(values_GU)
    return [[value - mean for value in values_U] for values_U in values_GU]


def standardized(values_GU: Values) -> list[list[float]]:
    """Mean-only advantages over the sample standard deviation: GRPO (arXiv 2402.03300).

    ``A_i = (r_i - mean(r)) / (std(r) + 1e-4)`` with ``std² = Σ (r_j - mean)² / (G - 1)``, as TRL,
    verl and SkyRL compute it. The population's deviation, which rLLM takes, is smaller by
    ``√((G - 1) / G)``: in groups of one size a matter of the learning rate alone. Example:
    ``[1, 0, 1, 0]`` gives about ``[.866, -.866, .866, -.866]`` here and ±1 there.
    """
    centred_GU = mean_only(values_GU)
    squares = (a / math.sqrt(len(row_U)) for row_U in centred_GU for a in row_U)
    std = math.hypot(*squares) / math.sqrt(len(values_GU) - 1)
    return [[a / (std + STD_EPSILON) for a in row_U] for row_U in centred_GU]


def leave_one_out(values_GU: Values) -> list[list[float]]:
    """Value minus the mean of the *other* runs: RLOO (arXiv 2402.14740).

    ``A_i = r_i - mean_{j≠i}(r_j)``, which is ``G / (G - 1)`` times the mean-only advantage; the
    baseline of a run does not depend on the run itself. Example: ``[1, 0, 0, 0]`` gives
    ``[1, -1/3, -1/3, -1/3]``.
    """
    means_G, others = _means(values_GU), len(values_GU) - 1
    shares = [mean / others for mean in means_G]
    total = math.fsum(shares)
    return [
        [value - (total - share) for value in values_U]
        for values_U, share in zip(values_GU, shares, strict=True)
    ]


def maxrl(values_GU: Values) -> list[list[float]]:
    """Mean-only advantages over the mean: MaxRL (arXiv 2602.02710).

    ``A_i = (r_i - mean(r)) / mean(r)``. For rewards of 0 and 1 it follows the gradient of the
    log-likelihood of success instead of that of its probability: a scenario that is rarely solved
    weighs more. Example: ``[1, 0, 0, 0]`` gives ``[3, -1, -1, -1]``.

    Raises:
        InvalidRequest: a value is below 0: the mean is no rate of success then.
    """
    if (worst := min(min(values_U) for values_U in values_GU)) < 0:
        raise InvalidRequest(
            f"got the reward {worst!r} with advantage='maxrl', expected rewards of at least 0 "
            "(best 0 or 1); shift them, or take another advantage",
            param="reward",
        )
    mean = _mean(values_GU)
    return [[(value - mean) / mean for value in values_U] for values_U in values_GU]


#: `TrainConfig.advantage` -> the function that computes it from a pool with variance.
ADVANTAGES: dict[str, Callable[[Values], list[list[float]]]] = {
    "mean": mean_only,
    "standardized": standardized,
    "leave_one_out": leave_one_out,
    "maxrl": maxrl,
}


def pool_advantages(
    values_GU: Values, kind: str = "mean", tolerance: float = 1e-6
) -> list[list[float]] | None:
    """The advantage of every value of a pool; None for a single run or zero variance.

    A single run has nothing to be compared to: its raw reward is not an advantage.

    Args:
        values_GU: at least one value for each run.
        kind: a key of `ADVANTAGES`; default ``mean``.
        tolerance: largest difference between two values that still counts as equal.

    Raises:
        InvalidRequest: a value is NaN or infinite, the advantages overflow, or `kind` is unknown.
    """
    if kind not in ADVANTAGES:
        raise InvalidRequest(
            f"got advantage={kind!r}, expected one of {sorted(ADVANTAGES)}", param="advantage"
        )
    flat = [value for values_U in values_GU for value in values_U]
    if not all(map(math.isfinite, flat)):
        raise InvalidRequest(
            f"got the rewards {flat!r}, expected finite numbers; leave out the runs that were not "
            "scored",
            param="reward",
        )
    if len(values_GU) < 2 or has_zero_variance(flat, tolerance):
        return None
    advantages_GU = ADVANTAGES[kind](values_GU)
    if not all(math.isfinite(a) for row_U in advantages_GU for a in row_U):
        raise InvalidRequest(
            f"got rewards from {min(flat)!r} to {max(flat)!r}, whose differences are not finite; "
            "scale the rewards down",
            param="reward",
        )
    return advantages_GU
