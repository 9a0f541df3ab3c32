"""Groups of runs to a decision on every call: whether it is trained, its advantage and weight.

The order: exclude runs without a reward and runs in which the policy had no part; exclude groups by
staleness; overlong penalty; credit assignment (advantages, zero variance); exclude calls whose
tokens cannot be trained; loss weights. In a supervised step every call has advantage 1. No torch.

What is excluded is counted under a key of `TrainResult.excluded`, whose first part is the unit that
is excluded: ``groups.``, ``runs.`` or ``calls.``.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from langchain_art import wire
from langchain_art.credit import credit_assignment
from langchain_art.credit.candidates import CallDecision, CandidateCall, CandidateRun

#: Reasons of calls that cannot be learned from because of how they were sampled.
SAMPLING = frozenset({"greedy_decoding", "no_choice", "truncated_sampling", "grammar"})


@dataclass(frozen=True)
class BatchPlan:
    """The decisions on a batch."""

    decisions: list[list[list[CallDecision]]]  # for each group, run and call, in the order given
    excluded: Counter[str]
    """Count of each reason, in the unit that it names. Calls of an excluded group or run are not
    counted again, but for those of `SAMPLING` in a group whose runs fared alike: how calls are
    sampled is often why."""
    metrics: dict[str, float]
    """``runs_trained``, ``calls_trained``; ``reward_mean`` of the runs in a baseline that have one;
    of the trained calls ``staleness_mean`` and ``staleness_max``, in versions."""


@dataclass(frozen=True)
class _PlannedGroup:
    runs: Sequence[CandidateRun]
    unscored: Sequence[str | None]  # per run, why it has no reward; None if it has
    counted: list[int]  # indices of the runs in the baseline
    excluded_because: str | None  # why the whole group is excluded


def plan(
    groups: Sequence[Sequence[CandidateRun]],
    config: wire.StepConfig,
    *,
    given: bool = False,
    compared: Sequence[Mapping[str, Sequence[float]]] = (),
) -> BatchPlan:
    """Decide on every call of a batch.

    Args:
        groups: runs of one scenario each.
        config: all is read but the settings of the optimizer and the loss.
        given: the runs have their advantages (`CandidateRun.advantages`): none is computed, and
            runs without any are excluded in place of those without a reward.
        compared: `TrainRequest.compared`.

    Raises:
        InvalidRequest: rewards from which no advantage can be computed.
    """
    found = [_group(runs, config, given) for runs in groups]
    supervised = isinstance(config, wire.SFTConfig)
    average = config.aggregation if supervised else config.loss.aggregation
    overlong = None if supervised else config.overlong
    teacher = None if supervised else config.distillation
    baselines = [
        []
        if group.excluded_because
        else [_penalized(group.runs[i], overlong) for i in group.counted]
        for group in found
    ]
    if supervised:
        credits_ = [credit_assignment.equal_credit(runs) for runs in baselines]
    elif not config.reads_rewards:
        credits_ = [credit_assignment.GroupAdvantages({}, {}, None) for _ in baselines]
    elif given:
        tolerance = config.zero_variance_tolerance
        credits_ = [credit_assignment.given_credit(runs, tolerance) for runs in baselines]
    elif config.scores:
        credits_ = credit_assignment.score_credits(baselines, config)
    else:
        beside = zip(baselines, compared or [{}] * len(baselines), strict=True)
        credits_ = [credit_assignment.group_credit(runs, config, others) for runs, others in beside]
        if config.advantage.kind == "batch_standardized":
            credits_ = credit_assignment.over_batch_deviation(credits_)
    if teacher:
        pairs = zip(baselines, credits_, strict=True)
        credits_ = [credit_assignment.beside_teacher(runs, credit) for runs, credit in pairs]
    excluded: Counter[str] = Counter()
    decisions = [
        _decisions(group, credit, config, excluded)
        for group, credit in zip(found, credits_, strict=True)
    ]
    trained = [
        ((g, i), call, decision)
        for g, runs in enumerate(groups)
        for i, run in enumerate(runs)
        for call, decision in zip(run.calls, decisions[g][i], strict=True)
        if decision.excluded_because is None
    ]
    weights = call_weights([(run, call.tokens) for run, call, _ in trained], average)
    for (_, _, decision), weight in zip(trained, weights, strict=True):
        decision.weight = weight
    lags = [call.lag or 0 for _, call, _ in trained]
    metrics = {
        "runs_trained": float(len({run for run, _, _ in trained})),
        "calls_trained": float(len(lags)),
        "staleness_mean": statistics.fmean(lags) if lags else 0.0,
        "staleness_max": float(max(lags, default=0)),
    }
    if not supervised:  # it reads rewards
        counted = [group.runs[i] for group in found for i in group.counted]
        rewards = [run.total for run in counted if run.rewarded]
        metrics["reward_mean"] = statistics.fmean(rewards) if rewards else 0.0
    return BatchPlan(decisions, excluded, metrics)


def unscored(run: CandidateRun, scores: Collection[str] = ()) -> str | None:
    """Reason for which a run has no reward to learn from; None if it has.

    A failed run that was scored counts with that reward. A run without a score never counts as 0.
    If there are names of `scores`, these replace the reward.
    """
    if all(name in run.scores for name in scores) if scores else run.rewarded:
        return None
    return "runs.failed" if run.failed else "runs.unscored"


def without_advantage(run: CandidateRun) -> str | None:
    """Reason for which a run lacks advantages, where they come with the step; None if it has."""
    if any(one is not None for one in run.advantages or ()):
        return None
    return unscored(run) or "runs.without_advantage"


def stale(runs: Sequence[CandidateRun], max_staleness: int | None) -> str | None:
    """Reason for which the staleness of a group excludes it; None: it does not.

    ``groups.stale``: it is above the limit; None allows any number. ``groups.rolled_back``: the
    trained version does not descend from one that sampled a call, so there is no number of steps
    between them.

    The group is excluded whole: without its oldest runs, which are its longest, the baseline of
    the others would be biased (verl and prime-rl do the same).
    """
    lags = [call.lag for run in runs for call in run.calls if call.learns]
    known = [lag for lag in lags if lag is not None]
    if len(known) < len(lags):
        return "groups.rolled_back"
    too_old = max_staleness is not None and max(known, default=0) > max_staleness
    return "groups.stale" if too_old else None


def exclusion(run: CandidateRun, call: CandidateCall, mask_truncated: bool) -> str | None:
    """Reason for which a call's tokens are not trained, in a run that counts; None if they are.

    With `mask_truncated`, truncated replies and the calls of truncated runs are excluded from the
    loss and from its denominator; the run's reward stays in the baseline (arXiv 2503.14476,
    section 3.4).
    """
    if call.excluded_because is not None:
        return f"calls.{call.excluded_because}"
    if not call.steps:
        return "calls.superseded" if call.superseded else "calls.frozen"
    if mask_truncated and run.truncated:
        return "runs.truncated"
    if mask_truncated and call.truncated:
        return "calls.truncated"
    return None if call.tokens else "calls.empty"


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """Penalty on the reward of a long run: DAPO's soft punishment (arXiv 2503.14476, eq. 13).

    0 up to ``limit - buffer`` sampled tokens, from there linearly down to -1 at `limit` and beyond
    (``0 < buffer <= limit``). Example: with a limit of 16384 and a buffer of 4096, 12288 tokens
    give 0, 14336 give -0.5 and 16384 give -1.
    """
    return min(0.0, max(-1.0, (limit - buffer - tokens) / buffer))


def _group(runs: Sequence[CandidateRun], config: wire.StepConfig, given: bool) -> _PlannedGroup:
    max_staleness = None if isinstance(config, wire.SFTConfig) else config.max_staleness
    if isinstance(config, wire.SFTConfig) or not config.reads_rewards:
        why = [None] * len(runs)
    else:
        why = [without_advantage(one) if given else unscored(one, config.scores) for one in runs]
    counted = [i for i, run in enumerate(runs) if why[i] is None and run.learns]
    reason = stale([runs[i] for i in counted], max_staleness) if counted else "groups.empty"
    return _PlannedGroup(runs, why, counted, reason)


def _penalized(run: CandidateRun, overlong: wire.OverlongPenalty | None) -> CandidateRun:
    if overlong is None:
        return run
    tokens = sum(call.tokens for call in run.calls if call.steps)
    penalty = overlong_penalty(tokens, overlong.tokens, overlong.buffer)
    return replace(run, reward=(run.reward or 0.0) + penalty)


def _decisions(
    group: _PlannedGroup,
    credit: credit_assignment.GroupAdvantages,
    config: wire.StepConfig,
    excluded: Counter[str],
) -> list[list[CallDecision]]:
    """Decisions on one group's calls, still without weights; counts what is excluded."""
    group_reason = group.excluded_because or credit.whole
    if group_reason:
        excluded[group_reason] += 1
    positions = {i: position for position, i in enumerate(group.counted)}
    found: list[list[CallDecision]] = []
    for i, (run, why_unscored) in enumerate(zip(group.runs, group.unscored, strict=True)):
        whole = why_unscored or (group_reason if i in positions else None)
        decided: list[CallDecision] = []
        for k, call in enumerate(run.calls):
            place = (positions.get(i, -1), k)
            why = whole or exclusion(run, call, config.mask_truncated) or credit.reasons.get(place)
            decided.append(CallDecision(why, 0.0 if why else credit.advantages[place]))
        if why_unscored:
            excluded[why_unscored] += 1
        elif not whole:
            excluded.update(_reasons(decided))
        elif whole == credit.whole:
            sampled = (c.excluded_because for c in run.calls if c.excluded_because in SAMPLING)
            excluded.update(f"calls.{reason}" for reason in sampled)
        found.append(decided)
    return found


def _reasons(decisions: Sequence[CallDecision]) -> Counter[str]:
    """Reasons for which calls of one run are excluded; one that names runs counts once."""
    found = Counter(one.excluded_because for one in decisions if one.excluded_because)
    counted = Counter({why: 1 if why.startswith("runs.") else n for why, n in found.items()})
    if found.total() == len(decisions) and "runs.truncated" not in counted:
        counted["runs.without_trainable_calls"] = 1
    return counted


def call_weights(
    calls: Sequence[tuple[Hashable, int]], aggregation: wire.Aggregation = "token"
) -> list[float]:
    """The weight of each token of each call.

    - ``token``: 1/N, all trained tokens weigh the same: DAPO (arXiv 2503.14476, eq. 8).
    - ``sequence``: the mean of each call's tokens, then of calls: GRPO (arXiv 2402.03300).
    - ``run``: the mean of each run's tokens, then of runs: a run weighs the same however many
      calls, rows and tokens it has.
    - ``constant``: 1/constant: Dr. GRPO (arXiv 2503.20783). Its gradient has the direction of
      ``token``'s; its norm grows with the batch.

    Example, a run of calls of 1 and 3 tokens and a run with one call of 4 tokens::

        call_weights([("a", 1), ("a", 3), ("b", 4)], "token")     # [1/8, 1/8, 1/8]
        call_weights([("a", 1), ("a", 3), ("b", 4)], "sequence")  # [1/3, 1/9, 1/12]
        call_weights([("a", 1), ("a", 3), ("b", 4)], "run")       # [1/8, 1/8, 1/8]

    Args:
        calls: for each trained call of the batch, its run and how many of its tokens are trained.
        aggregation: see above; default ``token``.

    Returns:
        One weight per call. Times the calls' tokens they sum to 1 (but for ``constant``).
    """
    if isinstance(aggregation, wire.ConstantAggregation):
        return [1.0 / aggregation.value for _ in calls]
    if aggregation == "token":
        total = sum(tokens for _, tokens in calls)
        return [1.0 / total for _ in calls]
    if aggregation == "sequence":
        return [1.0 / (tokens * len(calls)) for _, tokens in calls]
    lengths: Counter[Hashable] = Counter()
    for run, tokens in calls:
        lengths[run] += tokens
    return [1.0 / (lengths[run] * len(lengths)) for run, _ in calls]
