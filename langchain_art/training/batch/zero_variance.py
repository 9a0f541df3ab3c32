"""Zero variance of a group, as far as the client can tell: for dynamic sampling.

The rule itself is `wire.zero_variance`, which the server's credit assignment uses too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from langchain_art.credit.advantages import has_zero_variance
from langchain_art.credit.batch_plan import overlong_penalty
from langchain_art.training.batch.advantage_hook import RunAdvantages
from langchain_art.wire import (
    AnchorCredit,
    TrainConfig,
    Trajectory,
    TrajectoryGroup,
    Turn,
    TurnCredit,
)
from langchain_art.wire.calls import label


def group_has_zero_variance(
    group: TrajectoryGroup,
    config: TrainConfig,
    trainable: Mapping[str, bool],
    advantages: Mapping[str, RunAdvantages] | None = None,
) -> bool:
    """True if the server would exclude the whole group, because its runs have equal rewards.

    What is compared follows `TrainConfig.credit`: for ``run``, ``node`` and ``call``, and for
    scores, just as the server does it. For ``turn`` and ``anchor``, where it depends on what each
    call was worth, a group with rewards of single calls or with discounted rewards never has zero
    variance. Where `advantages` of the runs are given, none of them must be other than 0.
    """
    if config.distillation is not None:  # each token has something to learn
        return False
    if advantages is not None:
        return not any(
            abs(value) > config.zero_variance_tolerance
            for run in group.trajectories
            for turn, given in zip(run.turns, advantages.get(run.id, ()), strict=False)
            if given is not None and _is_step(turn, trainable)
            for value in (given if isinstance(given, Sequence) else (given,))
        )
    runs = [run for run in group.trajectories if is_rewarded(run, config)]
    tolerance = config.zero_variance_tolerance
    if config.credit.kind == "call":
        return all(has_zero_variance(v, tolerance) for v in _by_call(runs, trainable))
    if len(runs) < 2:
        return True
    if config.scores:
        return all(
            has_zero_variance([run.scores[name] for run in runs], tolerance)
            for name in config.scores
        )
    if config.credit.kind == "node":
        return all(has_zero_variance(v, tolerance) for v in _by_node(runs, config, trainable))
    totals = [_own(run, config, trainable) + math.fsum(_rewards(run.turns)) for run in runs]
    if isinstance(config.credit, TurnCredit | AnchorCredit):
        if any(turn.reward for run in runs for turn in run.turns):
            return False
        if config.credit.discount != 1 and any(totals):
            return False
    return has_zero_variance(totals, tolerance)


def is_rewarded(run: Trajectory, config: TrainConfig) -> bool:
    """Whether a run has what is learned from: a reward, a call's reward, or all chosen scores."""
    if config.scores:
        return config.scores.keys() <= run.scores.keys()
    return run.reward is not None or bool(_rewards(run.turns))


def _rewards(turns: Sequence[Turn]) -> list[float]:
    return [
        turn.reward for turn in turns if turn.reward is not None and turn.excluded_because is None
    ]


def _by_node(
    runs: Sequence[Trajectory], config: TrainConfig, trainable: Mapping[str, bool]
) -> list[list[float]]:
    """For each node that learns, what each run in which it speaks is worth to it."""
    pools: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        own: defaultdict[str, list[Turn]] = defaultdict(list)
        for turn in _steps(run, trainable):
            own[label(turn)].append(turn)
        for node, turns in own.items():
            pools[node].append(_own(run, config, trainable) + math.fsum(_rewards(turns)))
    return list(pools.values())


def _by_call(runs: Sequence[Trajectory], trainable: Mapping[str, bool]) -> list[list[float]]:
    """The runs' own rewards, and for each node that learns those of its calls."""
    pools: defaultdict[str, list[float]] = defaultdict(list)
    for turn in (turn for run in runs for turn in _steps(run, trainable)):
        if turn.reward is not None:
            pools[label(turn)].append(turn.reward)
    return [[run.reward for run in runs if run.reward is not None], *pools.values()]


def _steps(run: Trajectory, trainable: Mapping[str, bool]) -> list[Turn]:
    return [turn for turn in run.turns if _is_step(turn, trainable)]


def _is_step(turn: Turn, trainable: Mapping[str, bool]) -> bool:
    return turn.ours and turn.excluded_because is None and turn.learns(trainable)


def _own(run: Trajectory, config: TrainConfig, trainable: Mapping[str, bool]) -> float:
    """The run's own reward, less the penalty for its length (DAPO, arXiv 2503.14476, eq. 13)."""
    reward, overlong = run.reward or 0.0, config.overlong
    if overlong is None:
        return reward
    usages = [turn.usage for turn in _steps(run, trainable) if turn.usage is not None]
    tokens = sum(usage.completion_tokens for usage in usages)
    return reward + overlong_penalty(tokens, overlong.tokens, overlong.buffer)
