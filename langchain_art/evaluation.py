"""The mean reward of a set of scenarios, on exactly one version of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from langchain_art.client import AsyncArtClient
from langchain_art.errors import ArtError
from langchain_art.history import EvalResult, summarize
from langchain_art.judging import Evaluator, judge
from langchain_art.rollout import Rollout, gather
from langchain_art.wire import Trajectory, TrajectoryGroup


async def evaluate(
    client: AsyncArtClient,
    model: str,
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
        client: of the server that serves `model`.
        model: a policy's name, ``policy@N``, or the base model's name: what the rollout calls.
        rollout: see `rollout.Rollout`.
        scenarios: held out from training.
        samples: runs per scenario.
        concurrency: most runs at once.
        evaluator: asked about groups in which a run that ended well has no reward.
        max_failed: fraction of the runs that may raise.
        step: noted in the result.
        on_done: called after each run.

    Raises:
        ArtError: the runs came from another version than the one that served at the beginning.
        RolloutFailed: more than `max_failed` of the runs raised.
    """
    started = time.monotonic()
    expected = await _serving(client, model)
    found = await gather(
        rollout,
        scenarios,
        group_size=samples,
        concurrency=concurrency,
        prefix=f"eval:{expected}",
        on_done=on_done,
        ready=client.ready,
        max_failed=max_failed,
    )
    groups = found.groups
    if evaluator is not None:
        groups = await _score_the_rest(groups, evaluator)
    runs = [t for group in groups for t in group.trajectories]
    _check(runs, expected, await _serving(client, model))
    return summarize(runs, step=step, version=expected, seconds=time.monotonic() - started)


async def _serving(client: AsyncArtClient, model: str) -> str:
    """The one version that `model` means now."""
    for status in await client.policies():
        if status.name == model:
            return f"{model}@{status.version}"
    return model


def _check(runs: Sequence[Trajectory], before: str, after: str) -> None:
    policy = before.partition("@")[0]
    models = {turn.model for run in runs for turn in run.turns if turn.ours and turn.model}
    versions = {name for name in models if name.partition("@")[0] == policy} | {after}
    if versions != {before}:
        raise ArtError(
            f"An evaluation of {before} was sampled from {sorted(versions)}. Evaluate while "
            f"nothing trains this policy, and let the rollout call model={policy!r} or {before!r}."
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
    judged = await judge(list(todo.values()), evaluator)
    scored = {group.id: group for group in judged.groups}
    return [scored.get(group.id, group) for group in groups]
