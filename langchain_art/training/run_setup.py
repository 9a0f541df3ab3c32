"""Where the runs of a fit or an evaluation are made, and their mean reward on one version."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ArtError, ConfigError, RolloutFailed
from langchain_art.evaluators.scoring import cost_of, score_groups
from langchain_art.ray import RayWorkers, require_ray
from langchain_art.rollout.gather import gather_from
from langchain_art.rollout.graph_rollout import check_inputs, fetch_remote, is_remote, score_remote
from langchain_art.rollout.queued_runs import QueuedRuns
from langchain_art.rollout.runner import Rollout, RolloutWorker, RunSource
from langchain_art.rollout.scenarios import draw, rollout_name
from langchain_art.training.fit_export import FitExport
from langchain_art.training.fit_settings import FitSettings
from langchain_art.training.progress import Display, MeanReward
from langchain_art.training.records import EvalResult, summarize
from langchain_art.wire import Trajectory, TrajectoryGroup
from langchain_art.wire.identifiers import scenario_id
from langchain_art.wire.trajectories import EVALUATION

_ON_RAY = "Those on the Ray cluster are being started; where one has no room, that is said."


@dataclass(frozen=True)
class Setup:
    """Settings, server, display, rollout and export of a fit or an evaluation; makes its runs."""

    plan: FitSettings
    client: AsyncArtClient
    display: Display
    """Also informed that no worker is there, and that the server is away."""
    rollout: Rollout | str
    export: FitExport | None = None

    @asynccontextmanager
    async def workers(self) -> AsyncGenerator[None, None]:
        """The workers that a fit has of its own, on a Ray cluster; none, if `plan` asks for none.

        Raises:
            ConfigError: Ray is not installed, or its cluster cannot be joined or reach the server.
        """
        plan, client = self.plan, self.client
        if plan.workers is None or plan.workers == "server":
            yield
            return
        require_ray()
        from langchain_art.ray.worker_pool import worker_pool  # noqa: PLC0415 - Ray

        chosen = RayWorkers() if plan.workers == "ray" else plan.workers
        where = (rollout_name(self.rollout), client.base_url, client.api_key)
        async with worker_pool(chosen, *where, plan.at_once, self.display.warn):
            yield

    async def try_out(self, scenarios: Sequence[Any]) -> None:
        """Run the rollout until one run works, on as many scenarios as a group has runs at most.

        Nothing is run if there is no scenario.

        Raises:
            RolloutFailed: none does, or more raise than `FitSettings.max_failed` of a group.
        """
        if not len(scenarios):
            return
        size = self.plan.group_size
        source = replace(self, export=None).source(uuid.uuid4().hex, lambda _: None)
        source.expect(size)
        try:
            for place in range(size):
                scenario = draw(scenarios, place, self.plan.seed)
                run = await source.run(scenario, scenario_id(scenario))
                if run.status != "failed":
                    return
            raise RolloutFailed(f"{size} runs raised. The first: {source.first_error}.")
        finally:
            await source.close()

    def source(self, batch: str, on_done: Callable[[Trajectory], None]) -> RunSource:
        """Source of the runs: this process, or workers, which get them under the id `batch`.

        `export` keeps what was recorded of each run, but not of workers' runs.

        Raises:
            ConfigError: the rollout is none that can be run there.
        """
        plan, client, rollout = self.plan, self.client, self.rollout
        if plan.workers is not None:
            return QueuedRuns(
                client,
                rollout_name(rollout),
                batch,
                max_failed=plan.max_failed,
                on_done=on_done,
                warn=self.display.warn,
                advice=None if plan.workers == "server" else _ON_RAY,
            )
        if isinstance(rollout, str):
            raise ConfigError(f"got the rollout {rollout!r}, expected a function")
        return RolloutWorker(
            rollout,
            plan.at_once,
            on_done=on_done,
            ready=client.ready,
            max_failed=plan.max_failed,
            on_run=None if self.export is None else self.export.keep,
            server=client.base_url,
            say=self.display.line,
        )

    async def evaluate(
        self,
        scenarios: Sequence[Any],
        *,
        samples: int,
        step: int | None = None,
        batch: str | None = None,
    ) -> EvalResult:
        """Run every scenario `samples` times and average the rewards.

        The evaluator scores groups in which a run that did not fail has no reward; runs that have
        one keep it. Raises as `Trainer.evaluate`. `batch`: id under which workers get the runs;
        None: used once.
        """
        plan, client, display = self.plan, self.client, self.display
        check_inputs(self.rollout, scenarios)
        started, paid = time.monotonic(), cost_of(plan.evaluator)
        note = MeanReward()
        expected = await _serving(client, plan.policies)
        if self.export is not None:
            self.export.expect(len(scenarios) * samples)

        def done(run: Trajectory) -> None:
            _check_versions([run], expected, ())
            advance(note(run))

        with display.bar("evaluating", len(scenarios) * samples) as advance:
            source = self.source(batch or uuid.uuid4().hex, done)
            prefix = f"eval:{expected[0]}"
            found = await gather_from(
                source, scenarios, group_size=samples, prefix=prefix, seed=plan.seed
            )
            groups = found.groups
            if found.failed and found.first_error:
                display.line(f"{found.failed} rollouts failed; the first: {found.first_error}")
            if is_remote(self.rollout):
                groups = await fetch_remote(client, groups)
            unscored = [
                group
                for group in groups
                if any(t.reward is None and t.status != "failed" for t in group.trajectories)
            ]
            if plan.evaluator is not None and unscored:
                needed = not any(group.rewards for group in groups)
                with display.bar("judging", len(unscored)) as judging:
                    judged = await score_groups(
                        unscored, plan.evaluator, on_done=judging, needed=needed
                    )
                if judged.first_error:
                    display.line(f"{judged.unjudged} groups were not judged: {judged.first_error}")
                scored = {group.id: group for group in judged.groups}
                groups = [_with_own(group, scored.get(group.id, group)) for group in groups]
            runs = [t for group in groups for t in group.trajectories]
            _check(runs, expected, await _serving(client, plan.policies))
            kept = groups if plan.export is None else map(plan.export.mark, groups)
            marked = [group.marked({EVALUATION: " + ".join(expected)}) for group in kept]
            if is_remote(self.rollout):  # the server has the runs already, of their calls
                await score_remote(client, marked)
            else:
                await client.post_groups(marked)
        result = summarize(
            runs,
            step=step,
            versions=expected,
            seconds=time.monotonic() - started,
            judge_cost=cost_of(plan.evaluator, paid),
        )
        if self.export is not None:
            await self.export.evaluation(groups, result)
        return result


def _with_own(group: TrajectoryGroup, judged: TrajectoryGroup) -> TrajectoryGroup:
    """A judged group whose runs that brought a reward have that one."""
    own = {run.id: run.reward for run in group.trajectories if run.reward is not None}
    runs = tuple(
        run.model_copy(update={"reward": own.get(run.id, run.reward)})
        for run in judged.trajectories
    )
    return judged.model_copy(update={"trajectories": runs})


async def _serving(client: AsyncArtClient, models: Sequence[str]) -> list[str]:
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
