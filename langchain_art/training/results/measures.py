"""Measures of runs, for the records of steps and evaluations."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from langchain_art.statistics.intervals import best_of_scenarios, mean_of_scenarios
from langchain_art.training.results.records import EvalResult
from langchain_art.wire import Trajectory
from langchain_art.wire.calls import label


def summarize(
    trajectories: Sequence[Trajectory],
    *,
    step: int | None,
    versions: Sequence[str],
    seconds: float,
    judge_cost: float | None = None,
) -> EvalResult:
    """Mean and 95 % interval of the runs' total returns."""
    by_scenario: defaultdict[str | None, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if (worth := trajectory.total_return) is not None:
            by_scenario[trajectory.scenario].append(worth)
    found = mean_of_scenarios(by_scenario.values())
    failed = sum(t.status == "failed" and t.total_return is None for t in trajectories)
    return EvalResult(
        step=step,
        versions=tuple(versions),
        mean=found.mean,
        ci95=found.ci95,
        n=found.rewards,
        scenarios={
            name: statistics.fmean(rewards) for name, rewards in by_scenario.items() if name
        },
        best_of=best_of_scenarios(by_scenario.values()),
        failed=failed,
        unscored=len(trajectories) - found.rewards - failed,
        node_rewards=node_rewards(trajectories),
        tokens=tokens(trajectories),
        seconds=seconds,
        judge_cost=judge_cost,
    )


def node_rewards(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Mean by node over runs of what its calls that count are worth together."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for run in trajectories:
        own: defaultdict[str, float] = defaultdict(float)
        for turn in run.turns:
            if turn.reward is not None and turn.excluded_because is None:
                own[label(turn)] += turn.reward
        for node, reward in own.items():
            found[node].append(reward)
    return {node: statistics.fmean(rewards) for node, rewards in found.items()}


def tokens(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Tokens of all calls whose usage is known: ``prompt`` and ``completion``."""
    usages = [turn.usage for t in trajectories for turn in t.turns if turn.usage]
    return {
        "prompt": sum(u.prompt_tokens for u in usages),
        "completion": sum(u.completion_tokens for u in usages),
    }
