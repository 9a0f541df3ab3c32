"""Export of a fit or an evaluation (`langchain_art.export`), and why its calls do not learn."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from langchain_art.export import ids
from langchain_art.export.exporter import Exporter
from langchain_art.export.records import Environment, Experiment, ExportedRun, Labels, SpanRecord
from langchain_art.export.run_spans import recorded_spans, spans_of_turns
from langchain_art.tracing.run import Run
from langchain_art.training.advantages import expected_plan
from langchain_art.training.fit_settings import FitSettings
from langchain_art.training.fit_state import PendingStep
from langchain_art.training.progress import Display
from langchain_art.training.records import EvalResult
from langchain_art.wire import TrainResult, Trajectory, TrajectoryGroup

#: Runs that are kept at least until their group is exported.
LEAST_KEPT = 1024


class FitExport:
    """Exports the runs of a fit, or of an evaluation; the spool is in its folder."""

    def __init__(
        self, exporter: Exporter, plan: FitSettings, folder: Path, display: Display
    ) -> None:
        self._exporter = exporter
        self._plan = plan
        self._folder = folder
        self._display = display
        self._outbox = exporter.outbox(folder / "spool", display.warn)
        self._runs: dict[str, Run] = {}
        self.fit_id = uuid.uuid4().hex[:12]
        """Id by which its runs are known: a fit sets its own; an evaluation has this one."""
        batch = plan.group_size * plan.groups_per_step * (1 + plan.max_steps_ahead)
        self._most = max(4 * batch, LEAST_KEPT)  # those of groups that no step takes go with them
        self._evaluated = 0

    def expect(self, runs: int) -> None:
        """Make room for the runs of an evaluation, which are exported all at once."""
        self._evaluated = max(self._evaluated, runs)

    def keep(self, run: Run) -> None:
        """Keep what was recorded of a run until its group is exported."""
        self._runs[run.id] = run
        if len(self._runs) > self._most + self._evaluated:
            del self._runs[next(iter(self._runs))]

    async def step(self, pending: PendingStep, results: Mapping[str, TrainResult]) -> None:
        """Export the groups of a step that is trained."""
        why = exclusions(pending)
        tokens = {run.id: _tokens(run, why[run.id]) for run in pending.trajectories}
        told = sum(node.tokens for one in results.values() for node in one.nodes.values())
        # Where the job counts others, the server has left out calls for reasons of its own.
        exact = told == sum(tokens.values())

        def exported(run: Trajectory, labels: Labels) -> ExportedRun:
            return ExportedRun(
                trajectory=run,
                spans=self._spans(run),
                labels=labels,
                excluded=tuple(why[run.id]),
                trained_tokens=tokens[run.id] if exact else None,
            )

        await self._save(pending.groups, "train", pending.step, exported, {})

    async def evaluation(self, groups: Sequence[TrajectoryGroup], result: EvalResult) -> None:
        """Export the runs of an evaluation: Langfuse's experiment of these versions."""
        after = "" if result.step is None else f" after step {result.step}"
        experiment = Experiment(
            id=ids.experiment_id(self.fit_id, result.step, result.version),
            name=f"{result.version}{after} ({self._folder.name})",
            metadata={"fit": self.fit_id, "step": result.step, "versions": list(result.versions)},
        )
        known = {"reward_mean": result.mean, "reward_ci95": result.ci95}
        means = {name: value for name, value in known.items() if value is not None}

        def exported(run: Trajectory, labels: Labels) -> ExportedRun:
            known = labels.model_copy(update={"experiment": experiment})
            return ExportedRun(trajectory=run, spans=self._spans(run), labels=known)

        await self._save(groups, "eval", result.step, exported, {experiment.id: means})

    def close(self) -> None:
        """Send for a moment what is not sent yet, and say in one line what became of it."""
        outcome = self._outbox.close()
        if outcome.sent or outcome.left or outcome.refused:
            self._display.line(str(outcome))

    async def _save(
        self,
        groups: Sequence[TrajectoryGroup],
        environment: Environment,
        step: int | None,
        exported: Callable[[Trajectory, Labels], ExportedRun],
        experiments: dict[str, dict[str, float]],
    ) -> None:
        """Put the chosen groups on disk, in a thread: the loop has other runs under way."""
        chosen = [group for group in groups if self._exporter.chosen(group.id)]

        def save() -> None:
            runs = [
                exported(run, self._labels(group, environment, step))
                for group in chosen
                for run in group.trajectories
            ]
            digest = hashlib.sha256("".join(run.trajectory.id for run in runs).encode())
            when = "none" if step is None else f"{step:05}"
            name = f"{self.fit_id}.{environment}-{when}-{digest.hexdigest()[:8]}"
            self._outbox.save(name, runs, experiments)

        begun = time.monotonic()
        if chosen:
            await asyncio.to_thread(save)
        self._outbox.waited += time.monotonic() - begun
        for group in groups:
            for run in group.trajectories:
                self._runs.pop(run.id, None)

    def _labels(self, group: TrajectoryGroup, environment: Environment, step: int | None) -> Labels:
        when = environment if step is None else f"{environment}-{step}"
        known = {"fit": self.fit_id, "step": step, "group": group.id}
        told = [] if step is None else [f"step:{step}"]
        return Labels(
            name=self._exporter.name or " + ".join(self._plan.policies),
            environment=environment,
            session=f"{self._folder.name}/{when}/{group.id}",
            tags=(*self._exporter.tags, f"fit:{self._folder.name}", *told),
            metadata={name: value for name, value in known.items() if value is not None},
        )

    def _spans(self, run: Trajectory) -> tuple[SpanRecord, ...]:
        recorded = self._runs.get(run.id)
        return spans_of_turns(run.turns) if recorded is None else recorded_spans(recorded)


def exclusions(pending: PendingStep) -> dict[str, list[str | None]]:
    """Run id -> for each turn, why it does not learn, in the words of `TrainResult.excluded`.

    What the server alone knows (greedy decoding, a lost record, staleness) is not here.
    """
    found: dict[str, list[str | None]] = {}
    for group in pending.groups:
        plans = {
            policy: expected_plan(group, policy, config, pending.trainable, pending.advantages)
            for policy, config in pending.configs.items()
        }
        any_other = next(iter(plans.values()))
        for i, run in enumerate(group.trajectories):
            by_turn = [plans.get((t.model or "").partition("@")[0], any_other) for t in run.turns]
            found[run.id] = [
                made.decisions[0][i][k].excluded_because for k, made in enumerate(by_turn)
            ]
    return found


def _tokens(run: Trajectory, why: Sequence[str | None]) -> int:
    learn = [turn.usage for turn, one in zip(run.turns, why, strict=True) if one is None]
    return sum(usage.completion_tokens for usage in learn if usage is not None)
