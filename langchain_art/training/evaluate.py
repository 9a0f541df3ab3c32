"""The mean reward of a set of scenarios, on exactly one version of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ArtError
from langchain_art.evaluators.scoring import Evaluator, score_groups
from langchain_art.rollout.gather import gather
from langchain_art.rollout.runner import Rollout
from langchain_art.training.results import EvalResult, summarize
from langchain_art.wire import Trajectory, TrajectoryGroup


async def evaluate(
    client: AsyncArtClient,
    models: Sequence[str],
    rollout: Rollout,
    scenarios: Sequence[Any],
    *,
    samples: int = 1,
    concurrency: int = 64,
    evaluator: Evaluator | None = None,
    max_failed: float = 0.5,
    step: int | None = None,
    on_done: Callable[[Trajectory], None] | None = None,
) -> EvalResult:
    """Run every scenario `samples` times and average the rewards.

    Args:
        client: of the server that serves `models`.
        models: names that the rollout calls: policies, ``policy@N``, or the base model.
        rollout: see `Rollout`.
        scenarios: held out from training.
        samples: runs per scenario.
        concurrency: most runs at once.
        evaluator: scores groups in which a run that did not fail has no reward.
        max_failed: fraction of the runs that may raise.
        step: stored in the result.
        on_done: called after each run.

    Raises:
        ArtError: calls were sampled from other versions than those that served at the start.
        RolloutFailed: more than `max_failed` of the runs raised.
    """
    started = time.monotonic()
    expected = await _serving(client, models)
    found = await gather(
        rollout,
        scenarios,
        group_size=samples,
        concurrency=concurrency,
        prefix=f"eval:{expected[0]}",
        on_done=on_done,
        ready=client.ready,
        max_failed=max_failed,
    )
    groups = found.groups
    if evaluator is not None:
        groups = await _score_the_rest(groups, evaluator)
    runs = [t for group in groups for t in group.trajectories]
    _check(runs, expected, await _serving(client, models))
    return summarize(runs, step=step, versions=expected, seconds=time.monotonic() - started)


async def _serving(client: AsyncArtClient, models: Sequence[str]) -> list[str]:
    """The version that each of `models` is routed to now."""
    serving = {status.name: status.version for status in await client.policies()}
    return [f"{model}@{serving[model]}" if model in serving else model for model in models]


def _check(runs: Sequence[Trajectory], before: Sequence[str], after: Sequence[str]) -> None:
    policies = {name.partition("@")[0] for name in before}
    turns = [turn for run in runs for turn in run.turns if turn.ours and turn.call_id]
    called = {turn.model for turn in turns if turn.model}
    ours = {name for name in called if name.partition("@")[0] in policies}
    if called and not ours:
        raise ArtError(
            f"An evaluation of {' and '.join(before)} called {sorted(called)} instead. Let the "
            f"rollout call model={sorted(policies)[0]!r}, or evaluate the model that it does call."
        )
    found = ours | set(after)
    if not found <= set(before):
        raise ArtError(
            f"An evaluation of {' and '.join(before)} was sampled from {sorted(found)}. Evaluate "
            f"while nothing trains these policies, and let the rollout call {sorted(policies)} or "
            f"{sorted(before)}."
        )


async def _score_the_rest(
    groups: Sequence[TrajectoryGroup], evaluator: Evaluator
) -> list[TrajectoryGroup]:
    todo = {
        group.id: group
        for group in groups
        if any(t.reward is None and t.status != "failed" for t in group.trajectories)
    }
    if not todo:
        return list(groups)
    judged = await score_groups(list(todo.values()), evaluator)
    scored = {group.id: group for group in judged.groups}
    return [scored.get(group.id, group) for group in groups]
