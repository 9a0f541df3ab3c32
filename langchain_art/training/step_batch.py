"""The batch of a step: rollouts, evaluation, dynamic sampling, and the file it is stored in.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) replaces groups with zero variance: where it
is not asked for, only while a step would learn from less than half of its groups, and only groups
that fell short. Scenarios are drawn in shuffled epochs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from langchain_art.call_seeds import RunSeed
from langchain_art.errors import ArtError, ConfigError, RolloutFailed, ServerUnreachable
from langchain_art.evaluators.scoring import cost_of, score_groups
from langchain_art.rollout.gather import GroupStream
from langchain_art.rollout.graph_rollout import check_inputs, fetch_remote, is_remote
from langchain_art.rollout.scenarios import draw, group_ids
from langchain_art.training.advantages import (
    RunAdvantages,
    advantages_of,
    group_has_zero_variance,
    is_rewarded,
    may_teach,
)
from langchain_art.training.fit_settings import unmatched_frozen_names
from langchain_art.training.fit_state import History, PendingStep
from langchain_art.training.progress import MeanReward
from langchain_art.training.run_setup import Setup
from langchain_art.wire import NOT_HEARD, TrainConfig, Trajectory, TrajectoryGroup

_ROUNDS = 3  # of dynamic sampling, at most, where their number is not given


@dataclass
class StepBatchBuilder:
    """Makes the batches of a fit in order; rollouts may run ahead of the training.

    They run while `stream` is entered, and for `steps` steps of the whole fit at most.
    """

    setup: Setup
    history: History
    scenarios: Sequence[Any]
    steps: int

    def __post_init__(self) -> None:
        self.plan, self.display = self.setup.plan, self.setup.display
        check_inputs(self.setup.rollout, self.scenarios)
        self._is_remote = is_remote(self.setup.rollout)
        self._first = True
        self._replacements = 0
        self._retried = 0
        last = self.history.pending() or next(reversed(self.history.steps), None)
        self._done = last.step if last else 0
        self._drawn = last.drawn if last else 0
        self._left = last.left if last else ()
        self._taken: set[int] = set()  # places of groups, as in `_left`
        self._advance: Callable[[str], None] | None = None
        self._note = MeanReward()
        batch, size = f"{self.history.state.fit_id}:train", self.plan.group_size
        self._worker = self.setup.source(batch, self._on_done)
        self.stream = GroupStream(self._worker, self._scenario, self._name, size, self._seed)

    def _place(self, n: int) -> int:
        """The place in the shuffled epochs of the n-th group: those that were left come first."""
        return self._left[n] if n < len(self._left) else self._drawn + n

    def _scenario(self, n: int) -> Any:
        return draw(self.scenarios, self._place(n), self.plan.seed)

    def _name(self, n: int, scenario: str) -> str:
        prefix = f"{self.history.state.fit_id}:{self._place(n)}"
        return next(group_ids(prefix, [scenario]))

    def _seed(self, n: int, member: int) -> RunSeed:
        return RunSeed(self.plan.seed, "train", self._place(n), member)

    def _on_done(self, run: Trajectory) -> None:
        if self._advance is not None:
            self._advance(self._note(run))

    async def collect(self, step: int) -> PendingStep:
        """The batch of step `step`, stored before any of it is sent. Raises as `Trainer.fit`."""
        plan, paid = self.plan, cost_of(self.plan.evaluator)
        groups, seconds, unjudged = await self._judged(step, plan.groups_per_step)
        for config in () if plan.advantages is not None else plan.configs.values():
            _require_rewards(groups, config)
        advantages, resampled = await self._advantages(groups), 0
        rounds = plan.dynamic_sampling_rounds
        for _ in range(_ROUNDS if rounds is None else rounds):
            flat = [
                all(
                    group_has_zero_variance(group, policy, config, plan.trainable, advantages)
                    for policy, config in plan.configs.items()
                )
                for group in groups
            ]
            if (missing := self._missing(groups, flat)) <= 0:
                break
            resampled += missing
            self._replacements += missing
            try:
                more, took, lost = await self._judged(step, missing)
            except ArtError as error:
                if isinstance(error, ConfigError | RolloutFailed | ServerUnreachable):
                    raise  # not raised by the evaluator
                self.display.warn(f"{missing} replacement groups: {error}")
                unjudged += missing
                break
            groups, unjudged = [*groups, *more], unjudged + lost
            if advantages is not None:
                advantages |= await self._advantages(more) or {}
            seconds = {name: seconds[name] + took[name] for name in seconds}
        if self._first:
            runs = [run for group in groups for run in group.trajectories]
            told = [run.metadata.get(NOT_HEARD) for run in runs]  # the user's own, if no list
            missed = Counter(str(line) for one in told if isinstance(one, list) for line in one)
            for line, count in missed.items():
                self.display.warn(f"{count} of the {len(runs)} runs of the first batch: {line}.")
            if not self.history.steps or self.history.state.trainable != plan.trainable:
                for name in unmatched_frozen_names(plan.trainable, runs):
                    self.display.warn(
                        f"trainable: {name!r} is False and names no model call of the first "
                        "batch, so it freezes nothing."
                    )
                self.history.save(trainable=plan.trainable)
        self._first = False
        begun = map(self._place, range(max(self.stream.allowed, len(self._left))))
        pending = PendingStep(
            step=step,
            groups=tuple(groups if plan.export is None else map(plan.export.mark, groups)),
            configs=self.history.configs(plan.configs),
            trainable=plan.trainable,
            advantages=advantages,
            remote=self._is_remote,
            unjudged=unjudged,
            retried=self._worker.retried - self._retried,
            resampled=resampled,
            drawn=self._drawn + len(self._taken),
            left=tuple(place for place in begun if place not in self._taken),
            seconds=seconds,
            judge_cost=cost_of(plan.evaluator, paid),
        )
        self._retried = self._worker.retried
        self.history.begin(pending)
        return pending

    def _missing(self, groups: Sequence[TrajectoryGroup], flat: Sequence[bool]) -> int:
        """Number of groups to roll out besides; `flat` says which of `groups` have no variance."""
        plan, taught = self.plan, flat.count(False)
        if plan.dynamic_sampling_rounds is not None:
            return plan.groups_per_step - taught
        best = max(chain.from_iterable(group.rewards for group in groups), default=0.0)
        short = sum(
            max(group.rewards, default=best) < best
            and may_teach(group, plan.configs, plan.trainable)
            for group, is_flat in zip(groups, flat, strict=True)
            if is_flat
        )
        return min(short, (plan.groups_per_step + 1) // 2 - taught)

    async def _advantages(
        self, groups: Sequence[TrajectoryGroup]
    ) -> dict[str, RunAdvantages] | None:
        """Advantages that `Trainer(advantages=)` gives the runs; None: the server computes them."""
        if (hook := self.plan.advantages) is None:
            return None
        found: dict[str, RunAdvantages] = {}
        for group in groups:
            found |= await advantages_of(hook, group)
        return found

    async def _judged(
        self, step: int, count: int
    ) -> tuple[list[TrajectoryGroup], dict[str, float], int]:
        """The next groups, scored; seconds by phase; the number of groups that were not scored."""
        plan, started = self.plan, time.monotonic()
        allowed_steps = min(step + plan.max_steps_ahead, self.steps) - self._done
        allowed = allowed_steps * plan.groups_per_step + self._replacements
        self.stream.allow(allowed - self.stream.allowed)
        groups: list[TrajectoryGroup] = []
        self._note = MeanReward()
        with self.display.bar("rollouts", count * plan.group_size) as advance:
            self._advance = None if plan.max_steps_ahead else advance
            if not plan.max_steps_ahead:
                groups = await self.stream.take(count)
            while len(groups) < count:  # runs that end may be of later steps
                groups += await self.stream.take(1)
                for run in groups[-1].trajectories:
                    advance(self._note(run))
            self._advance = None
        self._taken |= {int(group.id.split(":")[1]) for group in groups}
        seconds = {"rollout": time.monotonic() - started}
        if self._is_remote:
            groups = await fetch_remote(self.setup.client, groups)
        failed = sum(run.status == "failed" for group in groups for run in group.trajectories)
        if failed and (error := self._worker.first_error):
            self.display.line(f"{failed} rollouts failed; the first: {error}")
        if plan.evaluator is None:
            return groups, seconds, 0
        started = time.monotonic()
        with self.display.bar("judging", len(groups)) as advance:
            judged = await score_groups(groups, plan.evaluator, on_done=advance)
        if judged.first_error:
            self.display.line(f"{judged.unjudged} groups were not judged: {judged.first_error}")
        seconds["judge"] = time.monotonic() - started
        return judged.groups, seconds, judged.unjudged


def _require_rewards(groups: Sequence[TrajectoryGroup], config: TrainConfig) -> None:
    if not config.reads_rewards:
        return
    runs = [t for group in groups for t in group.trajectories]
    ended = sum(run.status != "failed" for run in runs)
    if ended and not any(is_rewarded(run, config) for run in runs):
        raise ConfigError(
            f"None of {ended} runs has a reward. Set run.reward in the rollout, let it return "
            "a number, or pass evaluator= to the Trainer."
        )
