"""Credit assignment: rewards of runs to an advantage for every trained call. No torch.

`TrainConfig.credit` says what is compared with what. The caller excludes runs without a reward
and runs in which the policy had no part. Calls that are no steps of the policy
(`CandidateCall.steps`) get no advantage; a reward on one counts for the steps before it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

from langchain_art.credit.advantages import STD_EPSILON, has_zero_variance, pool_advantages
from langchain_art.credit.candidates import Compared, Place, Runs, WeightedPools, all_steps, steps
from langchain_art.credit.schemes import SCHEMES
from langchain_art.errors import InvalidRequest
from langchain_art.wire import TrainConfig


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

    A pool of one value, and a pool with zero variance, gives its calls no advantage.

    Args:
        runs: those with a reward in which the policy had a part.
        config: reads `credit`, `advantage` and `zero_variance_tolerance`.
        compared: of the group, `TrainRequest.compared`; read with ``call``.

    Raises:
        InvalidRequest: as `pool_advantages`.
    """
    pools = SCHEMES[config.credit.kind](runs, config.credit, compared or {})
    return _compare(runs, pools, config)


def score_credits(groups: Sequence[Runs], config: TrainConfig) -> list[GroupAdvantages]:
    """Advantages of a whole batch whose runs have several rewards: GDPO (arXiv 2601.05242).

    Each score is standardised within its group, so that its scale does not matter; the weighted
    sum is standardised over all runs of the batch whose group has variance in it.
    A score that is equal in all runs of a group adds nothing there.

    Args:
        groups: of each, the runs with every score in which the policy had a part.
        config: reads `scores` (name -> weight) and `zero_variance_tolerance`.

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

    Args:
        credits_: of `group_credit`, one for each group of the batch.
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


def _compare(runs: Runs, weighted: WeightedPools, config: TrainConfig) -> GroupAdvantages:
    """The sum of each call's advantages in its pools, each times the pool's weight."""
    advantages: defaultdict[Place, float] = defaultdict(float)
    alone: set[Place] = set()
    compared: set[Place] = set()
    live = False
    # The deviation of the batch is for the caller to divide by (`over_batch_deviation`).
    kind = "mean" if config.advantage.kind == "batch_standardized" else config.advantage.kind
    for pool, weight in weighted:
        values_GU = [[value for value, _ in unit] for unit in pool.values()]
        given = [places for unit in pool.values() for _, places in unit]
        compared.update(chain.from_iterable(given))
        advantages_GU = pool_advantages(values_GU, kind, config.zero_variance_tolerance)
        if advantages_GU is not None:
            live = True
            for places, advantage in zip(given, chain.from_iterable(advantages_GU), strict=True):
                for place in places:
                    advantages[place] += weight * advantage
        elif len(pool) == 1:
            alone.update(chain.from_iterable(given))
    unscored = set(all_steps(runs)) - compared
    return _with_reasons(runs, advantages, live, alone, unscored)


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
