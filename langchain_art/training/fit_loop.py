"""The loop of a fit: batch, training job, record, evaluation; run by `Trainer.fit`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ConfigError, JobFailed, NotFound
from langchain_art.rollout import remote_graph
from langchain_art.rollout.runner import Rollout
from langchain_art.training.evaluate import evaluate
from langchain_art.training.fit_settings import FitSettings
from langchain_art.training.fit_state import History, PendingStep
from langchain_art.training.progress import Display
from langchain_art.training.results import EvalResult, FitResult, StepRecord, tokens
from langchain_art.training.step_batch import StepBatchBuilder, note
from langchain_art.wire import LoraConfig, TrainResult


@dataclass(frozen=True)
class Schedule:
    """The number of steps, and when held-out scenarios are evaluated."""

    steps: int
    eval_scenarios: Sequence[Any] = ()
    eval_every: int | None = None
    eval_samples: int = 1

    def evaluates(self, step: int) -> bool:
        """True before the first step, after the last, and every `eval_every` steps."""
        every = self.eval_every or self.steps or 1
        return bool(self.eval_scenarios) and (step % every == 0 or step >= self.steps)


class FitLoop:
    """One call of `Trainer.fit`."""

    def __init__(
        self,
        plan: FitSettings,
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
        self._first = True

    async def run(self, scenarios: Sequence[Any], schedule: Schedule) -> FitResult:
        """Run all steps that are not done yet, and the evaluations."""
        history = self._history
        await self._client.ready(self._client.patience)
        versions = await self._versions()
        if history.resumed:
            self._display.line(f"Resuming after step {history.done} ({history.directory}).")
        if (former := history.select(self._plan.trainable)) is not None:
            self._display.warn(
                f"Which calls learn has changed: trainable={former} until here, "
                f"trainable={self._plan.trainable} in every batch that is collected from now on."
            )
        with self._display.bar("steps", max(schedule.steps, history.done), history.done) as advance:
            await self._evaluate(history.done, schedule)
            async with self._batches(scenarios, schedule.steps) as batches:
                for step in range(history.done + 1, schedule.steps + 1):
                    versions = await self._step(step, batches, schedule.steps)
                    await self._evaluate(step, schedule)
                    advance()
        return FitResult(
            fit_id=history.state.fit_id,
            versions=versions,
            before=history.eval_at(0),
            after=history.eval_at(max(schedule.steps, history.done)),
            best=best(history.evals),
            history=tuple(history.steps),
            evals=tuple(history.evals),
        )

    async def _versions(self) -> dict[str, int]:
        """The versions that serve; makes missing policies."""
        steps = self._history.steps
        last = steps[-1].versions if steps else {}
        serving: dict[str, int] = {}
        for name in self._plan.policies:
            serving[name] = await serving_version(self._client, name, self._plan.lora)
            if serving[name] < last.get(name, 0):
                raise ConfigError(
                    f"The server serves {name}@{serving[name]}, but the fit in "
                    f"{self._history.directory} had come to @{last[name]}: the policy was rolled "
                    "back, or this is another server. Pass resume=False to train on from what it "
                    "serves."
                )
        return serving

    # --- one step ---------------------------------------------------------------------------------

    def _batches(self, scenarios: Sequence[Any], steps: int) -> StepBatchBuilder:
        pending = self._history.pending()
        return StepBatchBuilder(
            self._plan,
            self._client,
            self._history,
            self._display,
            self._rollout,
            scenarios,
            steps=steps,
            done=self._history.done if pending is None else pending.step,
        )

    async def _step(self, step: int, batches: StepBatchBuilder, steps: int) -> dict[str, int]:
        history, first = self._history, self._first
        pending = history.pending() or await batches.collect(step)
        self._first = False
        started = time.monotonic()
        results = await self._train(pending)
        seconds = {**pending.seconds, "train": time.monotonic() - started}
        rewards = [t.reward for t in pending.trajectories if t.reward is not None]
        record = StepRecord(
            step=step,
            results=results,
            reward_mean=statistics.fmean(rewards) if rewards else None,
            reward_std=statistics.stdev(rewards) if len(rewards) > 1 else None,
            groups=len(pending.groups),
            failed=sum(t.status == "failed" for t in pending.trajectories),
            retried=pending.retried,
            unjudged=pending.unjudged,
            resampled=pending.resampled,
            drawn=pending.drawn,
            seconds={**seconds, "total": sum(seconds.values())},
            tokens=tokens(pending.trajectories),
        )
        history.append(record)
        history.end()
        self._display.step(record, steps, first=first)
        return record.versions

    async def _train(self, pending: PendingStep) -> dict[str, TrainResult]:
        """Each policy's job on the same groups; idempotency keys prevent training twice."""
        history, results = self._history, dict[str, TrainResult]()
        groups = await self._post(pending)
        for policy in self._plan.policies:
            key = history.state.key(policy, pending.step)
            job = await self._client.train(groups, policy, pending.config, key, pending.trainable)
            try:
                results[policy] = await self._client.wait(job)
            except JobFailed:
                # The keys are used: a resumed fit repeats this step with new rollouts and keys.
                failed = dict(history.state.failed_jobs)
                failed[pending.step] = failed.get(pending.step, 0) + 1
                history.save(history.state.model_copy(update={"failed_jobs": failed}))
                history.end()
                raise
        return results

    async def _post(self, pending: PendingStep) -> list[list[str]]:
        """Send a step's runs with their rewards; returns their ids, group by group."""
        if pending.remote:
            return await remote_graph.score(self._client, pending.groups)
        await self._client.post_groups(pending.groups)
        return [[t.id for t in group.trajectories] for group in pending.groups]

    # --- evaluations ------------------------------------------------------------------------------

    async def _evaluate(self, step: int, schedule: Schedule) -> None:
        history, plan = self._history, self._plan
        if schedule.evaluates(step) and history.eval_at(step) is None:
            total = len(schedule.eval_scenarios) * schedule.eval_samples
            with self._display.bar("evaluating", total) as advance:
                result = await evaluate(
                    self._client,
                    plan.policies,
                    self._rollout,
                    schedule.eval_scenarios,
                    samples=schedule.eval_samples,
                    concurrency=plan.concurrency,
                    evaluator=plan.evaluator,
                    max_failed=plan.max_failed,
                    step=step,
                    on_done=lambda run: advance(note(run)),
                )
            history.append(result)
            self._display.eval(result)
        await self._pin_best()

    async def _pin_best(self) -> None:
        """Pin the best evaluated versions and unpin this fit's former ones, no others."""
        if (champion := best(self._history.evals)) is None:
            return
        for name in champion.versions:
            policy, _, version = name.partition("@")
            await self._pin(policy, int(version))

    async def _pin(self, policy: str, version: int) -> None:
        state = self._history.state
        former = state.pinned.get(policy)
        if version == former:
            return
        known = {c.version: c for c in await self._client.checkpoints(policy)}
        if version not in known:
            return  # deleted since it was evaluated
        pinned = {name: number for name, number in state.pinned.items() if name != policy}
        if not known[version].pinned:
            await self._client.pin(policy, version)
            pinned[policy] = version
        self._history.save(state.model_copy(update={"pinned": pinned}))
        if former is not None and former in known:
            await self._client.unpin(policy, former)


async def serving_version(client: AsyncArtClient, policy: str, lora: LoraConfig | None) -> int:
    """The version that a policy's name is routed to; makes a missing policy."""
    if lora is not None:
        return (await client.create_policy(policy, lora)).version
    try:
        return (await client.policy(policy)).version
    except NotFound:
        return (await client.create_policy(policy)).version


def best(evals: Sequence[EvalResult]) -> EvalResult | None:
    """The evaluation with the highest mean; the earliest of equals."""
    scored = [(e.mean, -i, e) for i, e in enumerate(evals) if e.mean is not None]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None
