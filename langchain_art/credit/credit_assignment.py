"""Credit assignment: rewards of runs to an advantage for every trained call. No torch.

`TrainConfig.credit` says what is compared with what. The caller excludes runs without a reward
and runs in which the policy had no part. Calls that are no steps of the policy
(`CandidateCall.steps`) get no advantage; a reward on one counts for the steps before it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

from langchain_art.credit.advantages import STD_EPSILON, has_zero_variance, pool_advantages
from langchain_art.credit.candidates import CandidateRun
from langchain_art.errors import InvalidRequest
from langchain_art.wire import AnchorCredit, TrainConfig, TurnCredit

#: A call: the index of its run in the group, its own index in the run.
Place = tuple[int, int]
#: What is compared: for each unit of the statistics, values and the calls that each is given to.
Pool = dict[Hashable, list[tuple[float, list[Place]]]]


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of one group's calls."""

    advantages: dict[Place, float | Sequence[float]]  # of the calls whose pool has variance
    reasons: dict[Place, str]  # why the policy's other steps have none (``calls.…``)
    whole: str | None  # why no call of the group has one (``groups.…``); None if a call has


def group_credit(
    runs: Sequence[CandidateRun],
    config: TrainConfig,
    compared: Mapping[str, Sequence[float]] | None = None,
) -> GroupAdvantages:
    """The advantage of every call of one group, as `config.credit` says.

    - ``run``: a run's reward, its calls' included, against the other runs'; all calls get the same.
    - ``node``: for each node, the run's own reward and those of the node's calls in it, against the
      other runs with that node; the node's calls get the same. Dr. MAS (arXiv 2602.08847), which
      has no rewards of calls.
    - ``call``: ``A_run + A_call``, the one a run's own reward against the other runs', the other a
      call's reward against those of all rewarded calls of its node. Runs and calls without a reward
      are compared with nothing: None is not 0.
    - ``turn``: a call's return (`returns`) against the mean of the runs' mean returns. MT-GRPO
      (arXiv 2505.11821) and GTPO (2511.14846) have such returns; here a long run weighs no more.
    - ``anchor``: ``A_run + weight * A_state``, the latter a call's return against those of
      all calls of the group that were asked in the same state. GiGPO (arXiv 2505.10978).

    A pool of one value, and a pool with zero variance, gives its calls no advantage.

    Args:
        runs: those with a reward in which the policy had a part.
        config: reads `credit`, `advantage` and `zero_variance_tolerance`.
        compared: of the group, `TrainRequest.compared`; read with ``call``.

    Raises:
        InvalidRequest: as `pool_advantages`.
    """
    credit = config.credit
    pools: list[Pool]
    if credit.kind == "node":
        pools = _node_pools(runs)
    elif credit.kind == "call":
        pools = _call_pools(runs, compared or {})
    elif isinstance(credit, TurnCredit):
        pools = [_turn_pool(runs, credit.discount)]
    else:
        pools = [{i: [(run.total, _steps(runs, i))] for i, run in enumerate(runs)}]
    weighted = [(pool, 1.0) for pool in pools]
    if isinstance(credit, AnchorCredit) and len(runs) > 1:
        weighted += [(pool, credit.weight) for pool in _state_pools(runs, credit.discount)]
    return _compare(runs, weighted, config)


def score_credits(
    groups: Sequence[Sequence[CandidateRun]], config: TrainConfig
) -> list[GroupAdvantages]:
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
                advantages |= dict.fromkeys(_steps(runs, i), next(batch)[0])
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


def equal_credit(runs: Sequence[CandidateRun]) -> GroupAdvantages:
    """An advantage of 1 for every step (supervised fine-tuning, `SFTConfig`)."""
    return GroupAdvantages(dict.fromkeys(_all_steps(runs), 1.0), {}, None)


def beside_teacher(runs: Sequence[CandidateRun], credit: GroupAdvantages) -> GroupAdvantages:
    """Every step with its advantage by rewards, or 0: it learns from a teacher anyway."""
    nothing: dict[Place, float | Sequence[float]] = dict.fromkeys(_all_steps(runs), 0.0)
    return GroupAdvantages(nothing | credit.advantages, {}, None)


def given_credit(runs: Sequence[CandidateRun], tolerance: float) -> GroupAdvantages:
    """The advantages that came with the step (`CandidateRun.advantages`), as they are.

    A group in which none is further than `tolerance` from 0 has nothing to learn from, as one with
    zero variance.
    """
    advantages: dict[Place, float | Sequence[float]] = {}
    live = False
    for i, k in _all_steps(runs):
        given = (runs[i].advantages or ())[k]
        if given is not None:
            advantages[i, k] = given
            values = given if isinstance(given, Sequence) else (given,)
            live = live or any(abs(value) > tolerance for value in values)
    found = _with_reasons(runs, advantages, live)
    left_out = dict.fromkeys(found.reasons, "calls.without_advantage")
    return replace(found, reasons=left_out)


def returns(run: CandidateRun, discount: float) -> dict[int, float]:
    """The return of each step of the policy: its own reward and the discounted later ones.

    ``R_t = Σ_{k ≥ t} discount^(k - t) r_k`` over the steps, the run's own reward being that of the
    last one. A reward on another call belongs to the last step before it, or to the first step, if
    there is none. The discount is 0 … 1.

    Example: steps with the rewards ``[1, None, 2]``, the run's own 4, discount 0.5:
    ``{0: 2.5, 1: 3.0, 2: 6.0}``, by the index of the call.
    """
    found: dict[int, float] = {}
    value = run.reward or 0.0
    for index in reversed(range(len(run.calls))):
        call = run.calls[index]
        value += call.reward or 0.0
        if call.steps:
            found[index] = value
            value *= discount
    if found:
        first = min(found)
        found[first] += math.fsum(call.reward or 0.0 for call in run.calls[:first])
    return found


def _compare(
    runs: Sequence[CandidateRun], weighted: Sequence[tuple[Pool, float]], config: TrainConfig
) -> GroupAdvantages:
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
    unscored = set(_all_steps(runs)) - compared
    return _with_reasons(runs, advantages, live, alone, unscored)


def _node_pools(runs: Sequence[CandidateRun]) -> list[Pool]:
    pools: defaultdict[str, Pool] = defaultdict(dict)
    for i, run in enumerate(runs):
        places: defaultdict[str, list[Place]] = defaultdict(list)
        for place in _steps(runs, i):
            places[run.calls[place[1]].node].append(place)
        for node, own in places.items():
            rewards = (run.calls[k].reward or 0.0 for _, k in own)
            pools[node][i] = [(math.fsum([run.reward or 0.0, *rewards]), own)]
    return list(pools.values())


def _call_pools(
    runs: Sequence[CandidateRun], compared: Mapping[str, Sequence[float]]
) -> list[Pool]:
    whole: Pool = {
        i: [(run.reward, _steps(runs, i))] for i, run in enumerate(runs) if run.reward is not None
    }
    pools: defaultdict[str, Pool] = defaultdict(dict)
    for i, k in _all_steps(runs):
        call = runs[i].calls[k]
        if call.reward is not None:
            pools[call.node][i, k] = [(call.reward, [(i, k)])]  # here the unit is the call
    for node, values in compared.items():
        pool = pools[node] if node else whole
        pool |= {("compared", index): [(value, [])] for index, value in enumerate(values)}
    return [whole, *pools.values()]


def _turn_pool(runs: Sequence[CandidateRun], discount: float) -> Pool:
    units = {i: returns(run, discount) for i, run in enumerate(runs)}
    return {i: [(v, [(i, k)]) for k, v in unit.items()] for i, unit in units.items() if unit}


def _state_pools(runs: Sequence[CandidateRun], discount: float) -> list[Pool]:
    pools: defaultdict[Hashable, Pool] = defaultdict(dict)
    for i, run in enumerate(runs):
        for k, value in returns(run, discount).items():
            if (anchor := run.calls[k].anchor) is not None:
                pools[anchor][i, k] = [(value, [(i, k)])]  # here the unit is the call
    return [pool for pool in pools.values() if len(pool) > 1]


def _weighted_scores(runs: Sequence[CandidateRun], config: TrainConfig) -> list[float]:
    """Per run, the weighted sum of its scores, each standardised within the group."""
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


def _steps(runs: Sequence[CandidateRun], i: int) -> list[Place]:
    return [(i, k) for k, call in enumerate(runs[i].calls) if call.steps]


def _all_steps(runs: Sequence[CandidateRun]) -> list[Place]:
    return [place for i in range(len(runs)) for place in _steps(runs, i)]


def _with_reasons(
    runs: Sequence[CandidateRun],
    advantages: Mapping[Place, float | Sequence[float]],
    live: bool,
    alone: Collection[Place] = (),
    unscored: Collection[Place] = (),
) -> GroupAdvantages:
    """Add why the other steps have none; `live` says whether any pool has variance."""
    steps = _all_steps(runs)
    if not live:
        single = len(runs) < 2 or len(alone) == len(steps) - len(unscored) > 0
        return GroupAdvantages({}, {}, "groups.single" if single else "groups.zero_variance")
    reasons = {
        place: "calls.unscored"
        if place in unscored
        else "calls.single"
        if place in alone
        else "calls.zero_variance"
        for place in steps
        if place not in advantages
    }
    return GroupAdvantages(dict(advantages), reasons, None)
