"""One fit from its first step to its last: what `Trainer.fit` runs, and what resumes it."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_art.client import AsyncArtClient
from langchain_art.errors import ConfigError, JobFailed, NotFound
from langchain_art.evaluation import evaluate
from langchain_art.history import (
    EvalResult,
    FitResult,
    History,
    PendingStep,
    StepRecord,
    tokens,
)
from langchain_art.judging import Evaluator, judge
from langchain_art.progress import Display
from langchain_art.rollout import Rollout, gather
from langchain_art.scenarios import batch
from langchain_art.wire import LoraConfig, TrainConfig, TrainResult, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class Plan:
    """How steps are made; see `Trainer` for each field."""

    policy: str
    evaluator: Evaluator | None
    group_size: int
    groups_per_step: int
    concurrency: int
    config: TrainConfig
    seed: int
    lora: LoraConfig | None
    max_failed: float


@dataclass(frozen=True)
class Schedule:
    """How many steps, and after which of them the held-out scenarios are run."""

    steps: int
    eval_scenarios: Sequence[Any] = ()
    eval_every: int | None = None
    eval_samples: int = 1

    def evaluates(self, step: int) -> bool:
        """True before the first step, after the last, and every `eval_every` between."""
        every = self.eval_every or self.steps or 1
        return bool(self.eval_scenarios) and (step % every == 0 or step >= self.steps)


class Fit:
    """One call of `Trainer.fit`."""

    def __init__(
        self,
        plan: Plan,
        client: AsyncArtClient,
        history: History,
        display: Display,
        rollout: Rollout,
    ) -> None:
        self._plan = plan
        self._client = client
        self._history = history
        self._display = display
        self._rollout = rollout

    async def run(self, scenarios: Sequence[Any], schedule: Schedule) -> FitResult:
        """All steps that are not done yet, and the evaluations around them."""
        history = self._history
        await self._client.ready(self._client.patience)
        version = await self._policy_version()
        if history.resumed:
            self._display.line(f"Going on after step {history.done} ({history.directory}).")
        with self._display.bar("steps", max(schedule.steps, history.done), history.done) as advance:
            await self._evaluate(history.done, schedule)
            for step in range(history.done + 1, schedule.steps + 1):
                version = await self._step(step, scenarios, schedule.steps)
                await self._evaluate(step, schedule)
                advance()
        return FitResult(
            fit_id=history.state.fit_id,
            policy=self._plan.policy,
            version=version,
            before=history.eval_at(0),
            after=history.eval_at(max(schedule.steps, history.done)),
            best=best(history.evals),
            history=tuple(history.steps),
            evals=tuple(history.evals),
            dropped=history.dropped(),
        )

    async def _policy_version(self) -> int:
        """The version that serves; makes the policy if need be."""
        name = self._plan.policy
        if self._plan.lora is not None:
            status = await self._client.create_policy(name, self._plan.lora)
        else:
            try:
                status = await self._client.policy(name)
            except NotFound:
                status = await self._client.create_policy(name)
        last = self._history.steps[-1].version if self._history.steps else 0
        if status.version < last:
            raise ConfigError(
                f"The server serves {name}@{status.version}, but the fit in "
                f"{self._history.directory} had come to @{last}: the policy was rolled back, or "
                "this is another server. Pass resume=False to train on from what it serves."
            )
        return status.version

    # --- one step ---------------------------------------------------------------------------------

    async def _step(self, step: int, scenarios: Sequence[Any], steps: int) -> int:
        history = self._history
        pending = history.pending() or await self._collect(step, scenarios)
        started = time.monotonic()
        result = await self._train(pending)
        seconds = {**pending.seconds, "train": time.monotonic() - started}
        rewards = [t.reward for t in pending.trajectories if t.reward is not None]
        dropped = Counter(result.dropped)
        if pending.unjudged:
            dropped["groups.unjudged"] += pending.unjudged
        record = StepRecord(
            step=step,
            version=result.version,
            reward_mean=statistics.fmean(rewards) if rewards else None,
            reward_std=statistics.stdev(rewards) if len(rewards) > 1 else None,
            groups=len(pending.groups),
            failed=sum(t.status == "failed" for t in pending.trajectories),
            retried=pending.retried,
            dropped=dict(dropped),
            metrics=result.metrics,
            seconds={**seconds, "total": sum(seconds.values())},
            tokens=tokens(pending.trajectories),
        )
        history.append(record)
        history.end()
        self._display.step(record, steps, self._plan.policy)
        return result.version

    async def _collect(self, step: int, scenarios: Sequence[Any]) -> PendingStep:
        """Roll out and judge a step's batch, and write it down before any of it is sent."""
        plan = self._plan
        chosen = batch(scenarios, plan.groups_per_step, step, plan.seed)
        with self._display.bar("rollouts", len(chosen) * plan.group_size) as advance:
            found = await gather(
                self._rollout,
                chosen,
                group_size=plan.group_size,
                concurrency=plan.concurrency,
                prefix=f"{self._history.state.fit_id}:{step}",
                on_done=lambda run: advance(_note(run)),
                ready=self._client.ready,
                max_failed=plan.max_failed,
            )
        groups, unjudged = found.groups, 0
        seconds = {"rollout": found.seconds}
        if plan.evaluator is not None:
            started = time.monotonic()
            judged = await judge(groups, plan.evaluator)
            groups, unjudged = judged.groups, judged.unjudged
            seconds["judge"] = time.monotonic() - started
            if judged.first_error:
                self._display.line(f"{unjudged} groups were not judged: {judged.first_error}")
        if found.first_error:
            self._display.line(f"{found.failed} rollouts failed; the first: {found.first_error}")
        _require_rewards(groups)
        pending = PendingStep(
            step=step,
            groups=tuple(groups),
            config=plan.config,
            unjudged=unjudged,
            retried=found.retried,
            seconds=seconds,
        )
        self._history.begin(pending)
        return pending

    async def _train(self, pending: PendingStep) -> TrainResult:
        history = self._history
        key = history.state.key(pending.step)
        job = await self._client.train(pending.groups, self._plan.policy, pending.config, key)
        try:
            return await self._client.wait(job)
        except JobFailed:
            # That key is used up: a resumed fit rolls this step out anew, under another one.
            failed = dict(history.state.failed_jobs)
            failed[pending.step] = failed.get(pending.step, 0) + 1
            history.save(history.state.model_copy(update={"failed_jobs": failed}))
            history.end()
            raise

    # --- evaluations ------------------------------------------------------------------------------

    async def _evaluate(self, step: int, schedule: Schedule) -> None:
        history, plan = self._history, self._plan
        if schedule.evaluates(step) and history.eval_at(step) is None:
            total = len(schedule.eval_scenarios) * schedule.eval_samples
            with self._display.bar("evaluating", total) as advance:
                result = await evaluate(
                    self._client,
                    plan.policy,
                    self._rollout,
                    schedule.eval_scenarios,
                    samples=schedule.eval_samples,
                    concurrency=plan.concurrency,
                    evaluator=plan.evaluator,
                    max_failed=plan.max_failed,
                    step=step,
                    on_done=lambda run: advance(_note(run)),
                )
            history.append(result)
            self._display.eval(result)
        await self._pin_best()

    async def _pin_best(self) -> None:
        """Pin the best evaluated version, unpin the one that was; leave alone others' pins."""
        champion = best(self._history.evals)
        if champion is None or champion.version is None:
            return
        state = self._history.state
        version = int(champion.version.rpartition("@")[2])
        if version == state.pinned:
            return
        policy = self._plan.policy
        known = {c.version: c for c in await self._client.checkpoints(policy)}
        if version not in known:
            return  # deleted by somebody since it was evaluated
        ours = not known[version].pinned
        if ours:
            await self._client.pin(policy, version)
        self._history.save(state.model_copy(update={"pinned": version if ours else None}))
        if state.pinned is not None and state.pinned in known:
            await self._client.unpin(policy, state.pinned)


def best(evals: Sequence[EvalResult]) -> EvalResult | None:
    """The evaluation with the highest mean; the earliest of equals."""
    scored = [(e.mean, -i, e) for i, e in enumerate(evals) if e.mean is not None]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def _note(run: Trajectory) -> str:
    return run.status if run.reward is None else f"reward {run.reward:.3g}"


def _require_rewards(groups: Sequence[TrajectoryGroup]) -> None:
    runs = [t for group in groups for t in group.trajectories if t.status != "failed"]
    if runs and all(run.reward is None for run in runs):
        raise ConfigError(
            f"None of {len(runs)} runs has a reward. Set run.reward in the rollout, let it return "
            "a number, or pass evaluator= to the Trainer."
        )
