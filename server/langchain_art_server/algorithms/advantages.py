"""Rewards of one group of runs to their advantages. No torch.

Statistics are taken once per *run*, never per call or per row: a run of many calls must not weigh
more in its group's mean. The caller leaves out runs that have no reward or that failed; here every
reward is a finite number or it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from langchain_art.errors import InvalidRequest

#: Rewards that differ by no more than this are equal (a judge's rarely tie to the last bit).
FLAT_TOLERANCE = 1e-6
#: Added to the standard deviation, as in TRL's GRPOTrainer.
STD_EPSILON = 1e-4


def mean_only(rewards_G: Sequence[float]) -> list[float]:
    """Reward minus the group's mean: Dr. GRPO (arXiv 2503.20783).

    ``A_i = r_i - mean(r)``. Example: ``[1, 0, 0, 0]`` gives ``[.75, -.25, -.25, -.25]``.

    Args:
        rewards_G: finite rewards of the G runs of a group, in the reward's own unit.

    Returns:
        One advantage per run, in the same order and unit; they sum to 0.
    """
    mean = math.fsum(reward / len(rewards_G) for reward in rewards_G)
    return [reward - mean for reward in rewards_G]


def standardized(rewards_G: Sequence[float]) -> list[float]:
    """Mean-only advantages over the sample standard deviation: GRPO (arXiv 2402.03300).

    ``A_i = (r_i - mean(r)) / (std(r) + 1e-4)`` with ``std² = Σ (r_j - mean)² / (G - 1)``, as TRL
    computes it. Example: ``[1, 0, 1, 0]`` gives about ``[.866, -.866, .866, -.866]``.

    Args:
        rewards_G: finite rewards of the G >= 2 runs of a group.

    Returns:
        One advantage per run, in the same order, without a unit.
    """
    centred_G = mean_only(rewards_G)
    std = math.hypot(*centred_G) / math.sqrt(len(rewards_G) - 1)
    return [centred / (std + STD_EPSILON) for centred in centred_G]


#: `TrainConfig.advantage` -> the function that computes it from a group that is not flat.
ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "mean": mean_only,
    "standardized": standardized,
}


def is_flat(rewards_G: Sequence[float], tolerance: float = FLAT_TOLERANCE) -> bool:
    """True if a group has nothing to teach: fewer than two runs, or all rewards equal.

    Args:
        rewards_G: finite rewards of a group.
        tolerance: largest difference between two rewards that still counts as equal; default 1e-6.
    """
    return len(rewards_G) < 2 or max(rewards_G) - min(rewards_G) <= tolerance


def group_advantages(rewards_G: Sequence[float], kind: str = "mean") -> list[float]:
    """The advantage of every run of a group; exactly 0.0 for each run of a flat group.

    A group of one is flat: with nothing to compare it to, its raw reward is not an advantage.

    Args:
        rewards_G: rewards of the group's runs, without those that failed or have no reward.
        kind: a key of `ADVANTAGES`; default ``mean``.

    Raises:
        InvalidRequest: a reward is NaN or infinite, the advantages overflow, or `kind` is unknown.
    """
    if kind not in ADVANTAGES:
        raise InvalidRequest(
            f"got advantage={kind!r}, expected one of {sorted(ADVANTAGES)}", param="advantage"
        )
    if not all(math.isfinite(reward) for reward in rewards_G):
        raise InvalidRequest(
            f"got the rewards {list(rewards_G)!r}, expected finite numbers; leave out the runs "
            "that were not scored",
            param="reward",
        )
    if is_flat(rewards_G):
        return [0.0] * len(rewards_G)
    advantages_G = ADVANTAGES[kind](rewards_G)
    if not all(math.isfinite(advantage) for advantage in advantages_G):
        raise InvalidRequest(
            f"got rewards from {min(rewards_G)!r} to {max(rewards_G)!r}, whose differences are not "
            "finite; scale the rewards down",
            param="reward",
        )
    return advantages_G
