"""Groups of runs to a decision on every call: whether it is trained, its advantage and weight.

The order: exclude runs without a reward and runs in which the policy had no part; exclude groups by
staleness; overlong penalty; credit assignment (advantages, zero variance); exclude calls whose
tokens cannot be trained; loss weights. In a supervised step every call has advantage 1. No torch.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from langchain_art.wire import JobConfig, OverlongPenalty, SFTConfig
from langchain_art.wire.zero_variance import overlong_penalty
from langchain_art_server.algorithms.credit.candidates import CallDecision, CandidateRun
from langchain_art_server.algorithms.credit.credit_assignment import (
    Credit,
    equal_credit,
    group_credit,
    score_credits,
)
from langchain_art_server.algorithms.credit.filters import (
    exclusion,
    stale,
    unscored,
)
from langchain_art_server.algorithms.credit.loss_weights import call_weights


@dataclass(frozen=True)
class BatchPlan:
    """The decisions on a batch.

    Attributes:
        decisions: for each group, run and call, in the order given.
        excluded: how often each reason occurred, in the unit that it names. Calls of an excluded
            group or run are not counted again.
        metrics: ``runs_trained``, ``calls_trained``; ``reward_mean`` of the runs in a baseline that
            have one; of the trained calls ``staleness_mean`` and ``staleness_max``, in versions.
    """

    decisions: list[list[list[CallDecision]]]
    excluded: Counter[str]
    metrics: dict[str, float]


@dataclass
class _Group:
    """One group while it is planned.

    Attributes:
        runs: all of them.
        unscored: per run, why it has no reward; None if it has.
        counted: indices of the runs in the baseline.
        excluded_because: why the whole group is excluded.
    """

    runs: Sequence[CandidateRun]
    unscored: list[str | None]
    counted: list[int] = field(default_factory=list[int])
    excluded_because: str | None = None


def plan(groups: Sequence[Sequence[CandidateRun]], config: JobConfig) -> BatchPlan:
    """Decide on every call of a batch.

    Args:
        groups: runs of one scenario each.
        config: all is read but the settings of the optimizer and the loss.

    Raises:
        InvalidRequest: rewards from which no advantage can be computed.
    """
    found = [_group(runs, config) for runs in groups]
    overlong = None if isinstance(config, SFTConfig) else config.overlong
    baselines = [
        []
        if group.excluded_because
        else [_penalized(group.runs[i], overlong) for i in group.counted]
        for group in found
    ]
    if isinstance(config, SFTConfig):
        credits_ = [equal_credit(runs) for runs in baselines]
    elif config.scores:
        credits_ = score_credits(baselines, config)
    else:
        credits_ = [group_credit(runs, config) for runs in baselines]
    excluded: Counter[str] = Counter()
    decisions = [
        _decisions(group, credit, config, excluded)
        for group, credit in zip(found, credits_, strict=True)
    ]
    _weigh(groups, decisions, config)
    metrics = _metrics(found, decisions)
    if isinstance(config, SFTConfig):
        del metrics["reward_mean"]  # a supervised step reads no reward
    return BatchPlan(decisions, excluded, metrics)


def _group(runs: Sequence[CandidateRun], config: JobConfig) -> _Group:
    if isinstance(config, SFTConfig):
        group, max_staleness = _Group(runs, [None] * len(runs)), None
    else:
        group = _Group(runs, [unscored(run, config.scores) for run in runs])
        max_staleness = config.max_staleness
    group.counted = [i for i, run in enumerate(runs) if group.unscored[i] is None and run.learns]
    counted = [runs[i] for i in group.counted]
    group.excluded_because = stale(counted, max_staleness) if counted else "groups.empty"
    return group


def _penalized(run: CandidateRun, overlong: OverlongPenalty | None) -> CandidateRun:
    if overlong is None:
        return run
    tokens = sum(call.tokens for call in run.calls if call.steps)
    penalty = overlong_penalty(tokens, overlong.tokens, overlong.buffer)
    return replace(run, reward=(run.reward or 0.0) + penalty)


def _decisions(
    group: _Group, credit: Credit, config: JobConfig, excluded: Counter[str]
) -> list[list[CallDecision]]:
    """Decisions on one group's calls; counts what is excluded."""
    group_reason = group.excluded_because or credit.whole
    if group_reason:
        excluded[group_reason] += 1
    places = {i: position for position, i in enumerate(group.counted)}
    found: list[list[CallDecision]] = []
    for i, run in enumerate(group.runs):
        whole = group.unscored[i] or (group_reason if i in places else None)
        decided: list[CallDecision] = []
        for k, call in enumerate(run.calls):
            place = (places.get(i, -1), k)
            why = whole or exclusion(run, call, config.mask_truncated) or credit.reasons.get(place)
            decided.append(
                CallDecision(why) if why else CallDecision(None, credit.advantages[place])
            )
        if group.unscored[i]:
            excluded[group.unscored[i] or ""] += 1
        elif not whole:
            excluded.update(_reasons(decided))
        found.append(decided)
    return found


def _reasons(decisions: Sequence[CallDecision]) -> Counter[str]:
    """Why calls of one run are excluded; a reason that names runs counts once."""
    found = Counter(
        decision.excluded_because for decision in decisions if decision.excluded_because
    )
    counted = Counter({why: 1 if why.startswith("runs.") else n for why, n in found.items()})
    if all(decision.excluded_because for decision in decisions) and "runs.truncated" not in counted:
        counted["runs.without_trainable_calls"] = 1
    return counted


def _weigh(
    groups: Sequence[Sequence[CandidateRun]],
    decisions: list[list[list[CallDecision]]],
    config: JobConfig,
) -> None:
    """Fill in the weights of what is trained."""
    places = [
        (g, i, k)
        for g, runs in enumerate(decisions)
        for i, calls in enumerate(runs)
        for k, decision in enumerate(calls)
        if decision.excluded_because is None
    ]
    calls = [((g, i), groups[g][i].calls[k].tokens) for g, i, k in places]
    average = config.aggregation if isinstance(config, SFTConfig) else config.loss.aggregation
    weights = call_weights(calls, average)
    for (g, i, k), weight in zip(places, weights, strict=True):
        decisions[g][i][k] = replace(decisions[g][i][k], weight=weight)


def _metrics(
    groups: Sequence[_Group], decisions: Sequence[Sequence[Sequence[CallDecision]]]
) -> dict[str, float]:
    trained = [
        [
            call
            for call, decision in zip(run.calls, decided, strict=True)
            if decision.excluded_because is None
        ]
        for group, of_runs in zip(groups, decisions, strict=True)
        for run, decided in zip(group.runs, of_runs, strict=True)
    ]
    lags = [call.lag for calls in trained for call in calls]
    counted = [group.runs[i] for group in groups for i in group.counted]
    rewards = [run.total for run in counted if run.rewarded]
    return {
        "runs_trained": float(sum(map(bool, trained))),
        "calls_trained": float(len(lags)),
        "reward_mean": statistics.fmean(rewards) if rewards else 0.0,
        "staleness_mean": statistics.fmean(lags) if lags else 0.0,
        "staleness_max": float(max(lags, default=0)),
    }
