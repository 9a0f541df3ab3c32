"""Credit assignment: rewards of runs to an advantage for every trained call. No torch.

`TrainConfig.credit` says what is compared with what. The caller excludes runs without a reward
and runs in which the policy had no part. Calls that are no steps of the policy
(`CandidateCall.steps`) get no advantage; a reward on one counts for the steps before it.

A *pool* holds the values that are compared: one sequence for each run, most often of one value, the
run's reward. Statistics count every run once, however many values it has, so that a run of many
calls weighs no more in the mean. An advantage is given for each value, in the same order.

Index suffixes: G runs of a group, U values of one run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

from langchain_art.credit.candidates import Compared, Place, Runs, all_steps, steps
from langchain_art.credit.schemes import SCHEMES
from langchain_art.errors import InvalidRequest
from langchain_art.wire import TrainConfig

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

    A single run has nothing to be compared to: its raw reward is not an advantage. Values that
    differ by at most `tolerance` are equal.

    Raises:
        InvalidRequest: a value is NaN or infinite, or the advantages overflow.
    """
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


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of one group's calls."""

    advantages: dict[Place, float | Sequence[float]]  # of the calls whose pool has variance
    reasons: dict[Place, str]  # why the policy's other steps have none (``calls.…``)
    whole: str | None  # why no call of the group has one (``groups.…``); None if a call has


def group_credit(
    runs: Runs, config: TrainConfig, compared: Compared | None = None
) -> GroupAdvantages:
    """The advantage of every call of one group, by the scheme that `config.credit` names.

    It is the sum of the call's advantages in its pools, each times the pool's weight. A pool of one
    value, and a pool with zero variance, gives its calls no advantage. `compared` are
    the group's (`TrainRequest.compared`). Raises InvalidRequest as `pool_advantages`.
    """
    advantages: defaultdict[Place, float] = defaultdict(float)
    alone: set[Place] = set()
    pooled: set[Place] = set()
    live = False
    # The deviation of the batch is for the caller to divide by (`over_batch_deviation`).
    kind = "mean" if config.advantage.kind == "batch_standardized" else config.advantage.kind
    for pool, weight in SCHEMES[config.credit.kind](runs, config.credit, compared or {}):
        values_GU = [[value for value, _ in unit] for unit in pool.values()]
        given = [places for unit in pool.values() for _, places in unit]
        pooled.update(chain.from_iterable(given))
        advantages_GU = pool_advantages(values_GU, kind, config.zero_variance_tolerance)
        if advantages_GU is not None:
            live = True
            for places, advantage in zip(given, chain.from_iterable(advantages_GU), strict=True):
                for place in places:
                    advantages[place] += weight * advantage
        elif len(pool) == 1:
            alone.update(chain.from_iterable(given))
    return _with_reasons(runs, advantages, live, alone, set(all_steps(runs)) - pooled)


def score_credits(groups: Sequence[Runs], config: TrainConfig) -> list[GroupAdvantages]:
    """Advantages of a whole batch whose runs have several rewards: GDPO (arXiv 2601.05242).

    Each score is standardised within its group, so that its scale does not matter; the weighted
    sum is standardised over all runs of the batch whose group has variance in it.
    A score that is equal in all runs of a group adds nothing there.

    Raises:
        InvalidRequest: a call has a reward of its own, which no score includes; or as
            `pool_advantages`.
    """
    sums = [_weighted_scores(runs, config) for runs in groups]
    flat = [[total] for total_G in sums if not has_zero_variance(total_G) for total in total_G]
    batch = iter(pool_advantages(flat, "standardized") or ())
    found: list[GroupAdvantages] = []
    for runs, total_G in zip(groups, sums, strict=True):
        advantages: dict[Place, float] = {}
        live = not has_zero_variance(total_G)
        if live:
            for i in range(len(runs)):
                advantages |= dict.fromkeys(steps(runs, i), next(batch)[0])
        found.append(_with_reasons(runs, advantages, live))
    return found


def over_batch_deviation(credits_: Sequence[GroupAdvantages]) -> list[GroupAdvantages]:
    """Mean-only advantages over their standard deviation in the whole batch.

    ``A / (std + 1e-4)`` with ``std² = Σ_i mean_k(A_ik²) / (R - 1)``, over the R runs i that have
    advantages and their calls k, so that each run counts once: REINFORCE++-Baseline (arXiv
    2501.03262), whose deviation is over tokens. Other than with ``standardized``, a group in which
    rewards differ less also weighs less. Example: groups with the rewards [1, 0] and [.1, 0]:
    about ±1.22 and ±.122.
    """
    single = [cast("dict[Place, float]", credit.advantages) for credit in credits_]
    by_run: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for group, advantages in enumerate(single):
        for (run, _), advantage in advantages.items():
            by_run[group, run].append(advantage)
    roots = [a / math.sqrt(len(calls)) for calls in by_run.values() for a in calls]
    scale = math.hypot(*roots) / math.sqrt(max(1, len(by_run) - 1)) + STD_EPSILON
    return [
        replace(credit, advantages={place: a / scale for place, a in advantages.items()})
        for credit, advantages in zip(credits_, single, strict=True)
    ]


def equal_credit(runs: Runs) -> GroupAdvantages:
    """An advantage of 1 for every step (supervised fine-tuning, `SFTConfig`)."""
    return GroupAdvantages(dict.fromkeys(all_steps(runs), 1.0), {}, None)


def beside_teacher(runs: Runs, credit: GroupAdvantages) -> GroupAdvantages:
    """Every step with its advantage by rewards, or 0: it learns from a teacher anyway."""
    nothing: dict[Place, float | Sequence[float]] = dict.fromkeys(all_steps(runs), 0.0)
    return GroupAdvantages(nothing | credit.advantages, {}, None)


def given_credit(runs: Runs, tolerance: float) -> GroupAdvantages:
    """The advantages that came with the step (`CandidateRun.advantages`), as they are.

    A group in which none is further than `tolerance` from 0 has nothing to learn from, as one with
    zero variance.
    """
    advantages: dict[Place, float | Sequence[float]] = {}
    live = False
    for i, k in all_steps(runs):
        given = (runs[i].advantages or ())[k]
        if given is not None:
            advantages[i, k] = given
            values = given if isinstance(given, Sequence) else (given,)
            live = live or any(abs(value) > tolerance for value in values)
    found = _with_reasons(runs, advantages, live)
    left_out = dict.fromkeys(found.reasons, "calls.without_advantage")
    return replace(found, reasons=left_out)


def _weighted_scores(runs: Runs, config: TrainConfig) -> list[float]:
    """Weighted sum of each run's scores, each standardised within the group."""
    if any(call.reward is not None for run in runs for call in run.calls):
        raise InvalidRequest(
            f"got rewards of single calls together with scores={dict(config.scores)!r}, expected "
            "one or the other; add them to a score",
            param="scores",
        )
    total_G = [0.0] * len(runs)
    for name, weight in config.scores.items():
        values_GU = [[run.scores[name]] for run in runs]
        for i, row_U in enumerate(
            pool_advantages(values_GU, "standardized", config.zero_variance_tolerance) or ()
        ):
            total_G[i] += weight * row_U[0]
    return total_G


def _with_reasons(
    runs: Runs,
    advantages: Mapping[Place, float | Sequence[float]],
    live: bool,
    alone: Collection[Place] = (),
    unscored: Collection[Place] = (),
) -> GroupAdvantages:
    """Add why the other steps have none; `live` says whether any pool has variance."""
    every = all_steps(runs)
    if not live:
        single = len(runs) < 2 or len(alone) == len(every) - len(unscored) > 0
        return GroupAdvantages({}, {}, "groups.single" if single else "groups.zero_variance")
    reasons = {
        place: "calls.unscored"
        if place in unscored
        else "calls.single"
        if place in alone
        else "calls.zero_variance"
        for place in every
        if place not in advantages
    }
    return GroupAdvantages(dict(advantages), reasons, None)
