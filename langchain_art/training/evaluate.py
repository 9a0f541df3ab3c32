"""The mean reward of a set of scenarios, on exactly one version of a model."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ArtError
from langchain_art.evaluators.scoring import cost_of, score_groups
from langchain_art.rollout import remote_graph
from langchain_art.rollout.gather import gather_from
from langchain_art.rollout.graph_rollout import check_inputs, is_remote
from langchain_art.rollout.runner import Rollout
from langchain_art.training.fit_export import FitExport
from langchain_art.training.fit_settings import FitSettings
from langchain_art.training.progress import Display, MeanReward
from langchain_art.training.records import EvalResult, summarize
from langchain_art.training.run_sources import run_source
from langchain_art.wire import Trajectory, TrajectoryGroup
from langchain_art.wire.trajectories import EVALUATION


async def evaluate(
    plan: FitSettings,
    client: AsyncArtClient,
    display: Display,
    rollout: Rollout | str,
    scenarios: Sequence[Any],
    *,
    samples: int,
    step: int | None = None,
    batch: str | None = None,
    export: FitExport | None = None,
) -> EvalResult:
    """Run every scenario `samples` times on the policies of `plan` and average the rewards.

    The plan's evaluator scores groups in which a run that did not fail has no reward. Raises as
    `Trainer.evaluate`. `batch`: id under which workers get the runs; None: one that is used once.
    """
    check_inputs(rollout, scenarios)
    started, paid = time.monotonic(), cost_of(plan.evaluator)
    note = MeanReward()
    expected = await _serving(client, plan.policies)

    def done(run: Trajectory) -> None:
        _check_versions([run], expected, ())
        advance(note(run))

    with display.bar("evaluating", len(scenarios) * samples) as advance:
        source = run_source(
            plan,
            client,
            display,
            rollout,
            batch or uuid.uuid4().hex,
            on_done=done,
            on_run=None if export is None else export.keep,
        )
        prefix = f"eval:{expected[0]}"
        found = await gather_from(
            source, scenarios, group_size=samples, prefix=prefix, seed=plan.seed
        )
        groups = found.groups
        unscored = [
            group
            for group in groups
            if any(t.reward is None and t.status != "failed" for t in group.trajectories)
        ]
        if plan.evaluator is not None and unscored:
            with display.bar("judging", len(unscored)) as judging:
                judged = await score_groups(unscored, plan.evaluator, on_done=judging)
            scored = {group.id: group for group in judged.groups}
            groups = [scored.get(group.id, group) for group in groups]
        runs = [t for group in groups for t in group.trajectories]
        _check(runs, expected, await _serving(client, plan.policies))
        kept = groups if plan.export is None else list(map(plan.export.mark, groups))
        await _keep(client, kept, " + ".join(expected), remote=is_remote(rollout))
    now = cost_of(plan.evaluator)
    result = summarize(
        runs,
        step=step,
        versions=expected,
        seconds=time.monotonic() - started,
        judge_cost=None if now is None else now - (paid or 0.0),
    )
    if export is not None:
        await export.evaluation(groups, result)
    return result


async def _keep(
    client: AsyncArtClient, groups: Sequence[TrajectoryGroup], versions: str, *, remote: bool
) -> None:
    """Store the runs on the server, for `langchain-art runs`, marked as an evaluation's."""
    mark = {EVALUATION: versions}
    marked = [
        group.model_copy(
            update={
                "trajectories": tuple(
                    run.model_copy(update={"metadata": run.metadata | mark})
                    for run in group.trajectories
                )
            }
        )
        for group in groups
    ]
    if remote:  # the server has the runs already, assembled from their calls
        await remote_graph.score(client, marked)
    else:
        await client.post_groups(marked)


async def _serving(client: AsyncArtClient, models: Sequence[str]) -> list[str]:
    """The version that each of `models` is routed to now."""
    serving = {status.name: status.version for status in await client.policies()}
    return [f"{model}@{serving[model]}" if model in serving else model for model in models]


def _check(runs: Sequence[Trajectory], before: Sequence[str], after: Sequence[str]) -> None:
    called = _called(runs)
    policies = sorted({name.partition("@")[0] for name in before})
    if called and not any(name.partition("@")[0] in policies for name in called):
        raise ArtError(
            f"An evaluation of {' and '.join(before)} called {sorted(called)} instead. Let the "
            f"rollout call model={policies[0]!r}, or evaluate the model that it does call."
        )
    _check_versions(runs, before, after)


def _check_versions(
    runs: Sequence[Trajectory], before: Sequence[str], after: Sequence[str]
) -> None:
    policies = {name.partition("@")[0] for name in before}
    found = {name for name in (*_called(runs), *after) if name.partition("@")[0] in policies}
    if not found <= set(before):
        raise ArtError(
            f"An evaluation of {' and '.join(before)} was sampled from {sorted(found)}. Evaluate "
            f"while nothing trains these policies, and let the rollout call {sorted(policies)} or "
            f"{sorted(before)}."
        )


def _called(runs: Sequence[Trajectory]) -> set[str]:
    turns = (turn for run in runs for turn in run.turns if turn.ours and turn.call_id)
    return {turn.model for turn in turns if turn.model}
