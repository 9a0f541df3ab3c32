"""The loop of a fit: gather, judge, train, evaluate; run by `Trainer.fit`."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from langchain_art.errors import ConfigError, Conflict, JobFailed
from langchain_art.rollout.graph_rollout import score_remote
from langchain_art.statistics.intervals import mean_of_scenarios
from langchain_art.trackers.tracker_thread import Tracker
from langchain_art.training import records
from langchain_art.training.addresses import check_server, serving_version
from langchain_art.training.collapse import no_gain
from langchain_art.training.fit_settings import Schedule
from langchain_art.training.fit_state import History, PendingStep
from langchain_art.training.learning_rates import choose_rates
from langchain_art.training.recovery import Recovery
from langchain_art.training.report import all_alike
from langchain_art.training.run_setup import Setup
from langchain_art.training.step_batch import StepBatchBuilder
from langchain_art.training.tracking import FitTracking
from langchain_art.wire import StepSeconds, TrainResult
from langchain_art.wire.identifiers import scenario_id

OnStep: TypeAlias = "Callable[[records.StepRecord], object]"
"""A hook of `Trainer.fit`, plain or async."""


@dataclass
class FitLoop:
    """One call of `Trainer.fit`."""

    setup: Setup
    history: History
    schedule: Schedule
    on_step: OnStep | None = None
    trackers: Sequence[Tracker] = ()
    fresh: bool = False

    def __post_init__(self) -> None:
        self.plan, self.client = self.setup.plan, self.setup.client
        self.display, self.export = self.setup.display, self.setup.export
        self._wanted: set[str] | None = None  # the versions that the latest `_pin` was for
        self._is_full = False  # the server refused a pin, which is said once

    async def run(self, scenarios: Sequence[Any]) -> records.FitResult:
        """Run all steps that are not done yet, and the evaluations."""
        if self.export is not None:
            self.export.fit_id = self.history.state.fit_id
        await self.client.ready()
        self._tracking = FitTracking(self.trackers, self.history, self.display)
        held_out = {scenario_id(one) for one in self.schedule.eval_scenarios}
        if seen := held_out & {scenario_id(one) for one in scenarios}:
            self.display.warn(
                f"{len(seen)} of {len(held_out)} eval_scenarios are training scenarios too, so "
                'that "held out" says nothing of what is new to the policy.'
            )
        try:
            self._recovery = Recovery(self.setup, self.history, self._tracking.record)
            await self._recovery.complete()
            versions = await self._versions()
            await self._begin(versions)
            await self._loop(scenarios)
            self.history.save(finished=self.history.done)
            learned = {name: versions[name] for name in self.plan.learning}
            result = self.history.result(self.history.state, self.history.versions or learned)
            await self._tracking.adapters(self.client, result)
            return result
        finally:
            self._tracking.finish()

    async def _loop(self, scenarios: Sequence[Any]) -> None:
        history, steps, done = self.history, self.schedule.steps, self.history.done
        with self.display.bar("steps", max(steps, done), done) as advance:
            # As if former evaluations were made now: they tell how long those to come take.
            begun = time.monotonic() - sum(one.seconds for one in history.evals)
            await self._settle()
            while self._goes_on:
                # After a rollback anew: what was under way came from a version that is discarded.
                batches = StepBatchBuilder(self.setup, history, scenarios, steps)
                async with batches.stream:
                    rolled_back = False
                    while self._goes_on and not rolled_back:
                        step = history.done + 1
                        # Gathered and judged; a step that was begun before a crash has its batch.
                        batch = history.pending() or await batches.collect(step)
                        if step == 1 and not self.schedule.eval_scenarios:
                            rewards = [reward for one in batch.groups for reward in one.rewards]
                            self._warn_if_alike(rewards, len(rewards))
                        started = time.monotonic()
                        results = await self._train(batch)
                        record = await self._record(batch, results, time.monotonic() - started)
                        left = self.schedule.seconds_left(
                            step,
                            step - done,
                            time.monotonic() - begun,
                            [one.seconds for one in history.evals],
                        )
                        self.display.step(record, steps, first=step == done + 1, left=left)
                        await self._report(record)
                        rolled_back = await self._settle()  # evaluated, if that is due
                        advance()

    async def _begin(self, versions: Mapping[str, int]) -> None:
        history, plan = self.history, self.plan
        history.save(steps=self.schedule.steps, began_with=history.state.began_with or versions)
        self._say_where_it_begins(versions)
        if not history.state.learning_rate:
            rates = await choose_rates(self.client, plan.configs, self.display)
            history.save(learning_rate=rates)
        former, begun = history.state.trainable, history.steps or history.pending()
        if begun and former != plan.trainable:
            self.display.warn(
                f"Which calls learn has changed: trainable={former} until here, "
                f"trainable={plan.trainable} in every batch that is collected from now on."
            )

    def _warn_if_alike(self, rewards: Collection[float], runs: int) -> None:
        if warning := all_alike(rewards, runs):
            self.display.warn(warning)

    @property
    def _goes_on(self) -> bool:
        return self.history.done < self.schedule.steps and not self.history.state.stopped

    async def _settle(self) -> bool:
        """Look for signs of a collapse after a step, and evaluate; True if it was rolled back."""
        step, rolled_back = self.history.done, await self._look()
        while await self._evaluate(step) and await self._look():
            rolled_back = True  # the version that serves now is evaluated too
        if why := self._no_gain():
            self._recovery.stop(why)
        return rolled_back

    async def _look(self) -> bool:
        ends = not self._goes_on or self._no_gain() is not None
        return await self._recovery.look(at_end=ends)

    def _no_gain(self) -> str | None:
        """Reason to stop early, if the fit would go on; None: nothing says so."""
        patience = self.schedule.stop_early
        if patience is None or not self._goes_on:
            return None
        return no_gain(self.history.kept_evals, patience)

    def _say_where_it_begins(self, versions: Mapping[str, int]) -> None:
        history, display = self.history, self.display
        if history.resumed and (history.steps or history.evals or history.pending()):
            display.line(f"Going on after step {history.done} ({history.directory}).")
            return
        for policy, version in versions.items():
            if version > 0:
                advice = f"use {'' if self.fresh else 'fit(…, fresh=True) or '}a policy"
                display.line(
                    f"{policy} is at @{version}: this fit goes on from what it has learned. To "
                    f"start from the base instead, {advice} of another name."
                )
        for whose in history.state.identity.unread:
            display.warn(
                f"The {whose} has no source that can be read: if it is changed and run again in "
                f"{history.directory}, that is not noticed."
            )

    async def _report(self, record: records.StepRecord) -> None:
        """Call the caller's hook; what it raises says that nothing of the training is lost."""
        if self.on_step is None:
            return
        try:
            called = self.on_step(record)
            if inspect.isawaitable(called):
                await called
        except Exception as error:
            said = (
                f"on_step raised after step {record.step}. The step is trained and kept in "
                f"{self.history.directory}: the same call goes on with step {record.step + 1}."
            )
            self.display.warn(f"{said} {type(error).__name__}: {error}")
            error.add_note(said)
            raise

    async def _versions(self) -> dict[str, int]:
        last = self.history.versions
        serving: dict[str, int] = {}
        await check_server(self.client, self.plan.policies, self.plan.configs)
        for name in self.plan.policies:
            serving[name] = await serving_version(self.client, name, self.plan.lora, self.display)
            if serving[name] < last.get(name, 0):
                raise ConfigError(
                    f"The server serves {name}@{serving[name]}, but the fit in "
                    f"{self.history.directory} had come to @{last[name]}: the policy was rolled "
                    "back, or this is another server. Pass fresh=True to begin anew from the base, "
                    "or give this fit another folder to train on from what is served."
                )
        return serving

    async def _record(
        self, pending: PendingStep, results: dict[str, TrainResult], took: float
    ) -> records.StepRecord:
        known = {name: getattr(pending, name) for name in records.BatchFacts.model_fields}
        seconds = {**pending.seconds, "train": took}
        by_group = [group.rewards for group in pending.groups]
        rewards = list(chain.from_iterable(by_group))
        trained = sum(node.tokens for one in results.values() for node in one.nodes.values())
        known |= {"seconds": {**seconds, "total": sum(seconds.values())}}
        record = records.StepRecord(
            **known,
            results=results,
            reward_mean=statistics.fmean(rewards) if rewards else None,
            reward_std=statistics.stdev(rewards) if len(rewards) > 1 else None,
            reward_ci95=mean_of_scenarios(by_group).ci95,
            node_rewards=records.node_rewards(pending.trajectories),
            groups=len(pending.groups),
            runs=len(rewards),
            run_ids=tuple(tuple(run.id for run in group.trajectories) for group in pending.groups),
            own_advantages=pending.advantages is not None,
            failed=sum(t.status == "failed" for t in pending.trajectories),
            tokens=records.tokens(pending.trajectories) | {"trained": trained},
        )
        if self.export is not None:  # before the step counts as done: its runs are not lost
            await self.export.step(pending, results)
        self.history.append(record)
        self.history.end()
        self._tracking.record(record, pending.groups)
        await self._pin()
        return record

    async def _train(self, pending: PendingStep) -> dict[str, TrainResult]:
        """Each policy's job on the same groups; idempotency keys prevent training twice."""
        state, results = self.history.state, dict[str, TrainResult]()
        if pending.remote:
            ids = await score_remote(self.client, pending.groups)
        else:
            await self.client.post_groups(pending.groups)
            ids = [[t.id for t in group.trajectories] for group in pending.groups]
        advantages = pending.advantages
        if advantages is not None:  # a remote run that failed before its first call is not there
            sent = {run for group in ids for run in group}
            advantages = {run: one for run, one in advantages.items() if run in sent}
        took = StepSeconds.model_validate(pending.seconds) if pending.seconds else None
        for policy, config in pending.configs.items():
            key = state.key(policy, pending.step)
            job = await self.client.train(
                ids,
                policy,
                state.config(config, policy),
                key,
                pending.trainable,
                advantages=advantages,
                seconds=took,
                schedule_step=pending.step,
            )
            try:
                with self.display.bar("training", 1) as advance:
                    results[policy] = await self.client.wait(
                        job, lambda event, told=advance: told(event.message, by=0)
                    )
            except JobFailed:
                # The keys are used: a resumed fit repeats this step with new rollouts and keys.
                tries = state.failed_jobs.get(pending.step, 0) + 1
                self.history.save(failed_jobs=state.failed_jobs | {pending.step: tries})
                self.history.end()
                raise
        return results

    async def _evaluate(self, step: int) -> bool:
        """Evaluate after `step`, if it is due and not done. Whether it was."""
        schedule = self.schedule
        is_due = schedule.evaluates(step) or bool(self.history.state.stopped)
        evaluates = is_due and bool(schedule.eval_scenarios) and not self.history.eval_at(step)
        if evaluates:
            result = await self.setup.evaluate(
                schedule.eval_scenarios,
                samples=schedule.eval_samples,
                step=step,
                batch=f"{self.history.state.fit_id}:eval",
            )
            self.history.append(result)
            self._tracking.record(result)
            self.display.eval(result)
            if step == 0:
                self._warn_if_alike(result.scenarios.values(), result.n)
        await self._pin()
        return evaluates

    async def _pin(self) -> None:
        """Pin the best evaluated versions and the latest; unpin this fit's former ones, no others.

        So what `langchain-art fits` recommends is kept, whatever is trained after this fit.
        """
        champion, former = records.best_of_evals(self.history.evals), self.history.state.pinned
        latest = {f"{name}@{version}" for name, version in self.history.versions.items()}
        wanted = latest.union(champion.versions if champion else ())
        if not wanted or wanted == self._wanted:  # none yet: a former fit's stay pinned
            return
        self._wanted, policies = wanted, self.plan.policies
        known = [one for name in policies for one in await self.client.checkpoints(name)]
        for one in known:
            if one.name in former - wanted:
                await self.client.unpin(one.policy, one.version)
        free = [one for one in known if one.name in wanted and not one.pinned]
        self.history.save(pinned=(former & wanted) | {one.name for one in free})
        for one in free:
            try:
                await self.client.pin(one.policy, one.version)
            except Conflict as full:
                if not self._is_full:
                    self.display.warn(str(full))
                self._is_full = True
