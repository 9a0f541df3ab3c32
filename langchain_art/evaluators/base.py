"""The base class of evaluators: Runnables that return a group with rewards; also of functions."""

from __future__ import annotations

import asyncio
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from threading import Lock, Thread, current_thread
from typing import Any, TypeVar, overload

from langchain_core.runnables import Runnable, RunnableConfig

from langchain_art._callables import only_errors
from langchain_art.errors import ConfigError, JudgeError
from langchain_art.evaluators.scoring import Evaluator, check_evaluator, score_group
from langchain_art.wire import Trajectory, TrajectoryGroup
from langchain_art.wire.identifiers import MAX_REWARD

#: The name in `Trajectory.scores` of a run's reward before any evaluator.
OWN = "own"
#: The key in `Trajectory.metadata` of the explanations: evaluator -> explanation.
JUDGED = "judged"

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Score:
    """The score of one run.

    Attributes:
        value: the run's reward.
        explanation: the reason, in words.
        parts: the values that it is computed from, each finite.

    Raises:
        ConfigError: a number is not finite, or beyond ±1e9 (`MAX_REWARD`).
    """

    value: float
    explanation: str = ""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        for name, number in {"value": self.value, **self.parts}.items():
            if not _is_within(number):
                raise ConfigError(
                    f"got {number!r:.80} for a score's {name}, expected a finite number within "
                    f"±{MAX_REWARD:g}; give None instead of a Score for a run that could not be "
                    "scored"
                )

    def named(self, key: str) -> dict[str, float]:
        """The value and the parts as they are in `Trajectory.scores`: ``key`` and ``key/part``."""
        return {key: self.value} | {f"{key}/{name}": part for name, part in self.parts.items()}


def _is_within(number: float) -> bool:
    try:
        return abs(number) <= MAX_REWARD  # not if it is NaN
    except TypeError:
        return False


class GroupEvaluator(Runnable[TrajectoryGroup, TrajectoryGroup], ABC):
    """Scores the runs of one scenario, relative to each other.

    It is a LangChain Runnable (``invoke``, ``ainvoke``, ``batch``, ``|``, ``with_retry``,
    callbacks), and an evaluator for `Trainer`, LangSmith's ``evaluate`` and Langfuse's
    ``run_experiment``. It returns the group with, for each run,

    - ``reward``: the score, or None where the run could not be scored;
    - ``scores[key]`` and ``scores["key/part"]``: the score and its parts;
    - ``scores["own"]``: the reward before any evaluator, never overwritten;
    - ``metadata["judged"][key]``: the explanation.

    Failed runs are not scored and stay as they are. Subclasses implement `ascore`, and may set
    `resolution`: if all scores of a group lie within it, each becomes their mean.

    Args:
        key: the score's name.

    Example::

        class Brief(GroupEvaluator):
            async def ascore(self, group):
                return [Score(1 / len(run.turns)) for run in group.trajectories]

        Trainer(model, evaluator=Brief("brief"))
    """

    resolution: float = 0.0
    """The largest difference of two scores that says nothing: noise of a clock or a judge."""

    def __init__(self, key: str) -> None:
        if not key or key in (OWN, "reward") or "/" in key:
            raise ConfigError(
                f"got the name {key!r} for a score, expected one that is not empty, without a "
                f"slash, and neither {OWN!r} nor 'reward', which are the runs' own"
            )
        self.key = key
        self.name = key
        self.__name__ = key  # by which LangSmith and Langfuse show it

    @property
    def cost(self) -> float | None:
        """US dollars spent so far, by it and its parts; None if none of them knows."""
        members: list[object] = []
        for value in vars(self).values():
            members += value.values() if isinstance(value, Mapping) else [value]
        costs = [one.cost for one in members if isinstance(one, GroupEvaluator)]
        known = [cost for cost in costs if cost is not None]
        return math.fsum(known) if known else None

    @abstractmethod
    async def ascore(self, group: TrajectoryGroup) -> Sequence[Score | None]:
        """The scores of a group's runs, in the runs' order; None: the run could not be scored.

        Raises:
            JudgeError: the whole group could not be scored.
        """

    @overload
    def __call__(self, group: TrajectoryGroup, /) -> Awaitable[TrajectoryGroup]: ...

    @overload
    def __call__(self, /, **given: Any) -> Any: ...

    def __call__(
        self,
        group: TrajectoryGroup | None = None,
        /,
        *,
        run: Any = None,
        runs: Any = None,
        example: Any = None,
        inputs: Any = None,
        outputs: Any = None,
        reference_outputs: Any = None,
        **given: Any,
    ) -> Any:
        """Call `ainvoke` with a group, for `Trainer`.

        With names that LangSmith's ``evaluate``, Langfuse's ``run_experiment`` or openevals pass:
        what they expect of an evaluator (see `integrations.by_name`).
        """
        if group is not None:
            return self.ainvoke(group)
        # It imports this module.
        from langchain_art.evaluators.integrations.by_name import called_by_name  # noqa: PLC0415

        known = {
            "run": run,
            "runs": runs,
            "example": example,
            "inputs": inputs,
            "outputs": outputs,
            "reference_outputs": reference_outputs,
        }
        return called_by_name(self, given | {k: v for k, v in known.items() if v is not None})

    async def ainvoke(
        self, input: TrajectoryGroup, config: RunnableConfig | None = None, **kwargs: Any
    ) -> TrajectoryGroup:
        """The group with rewards.

        Raises:
            JudgeError: the group could not be judged. `Trainer` counts it as ``groups.unjudged``.
        """
        return await self._acall_with_config(self._judged, input, config, **kwargs)

    def invoke(
        self, input: TrajectoryGroup, config: RunnableConfig | None = None, **kwargs: Any
    ) -> TrajectoryGroup:
        """Synchronous `ainvoke`, from any thread, also where an event loop is running."""
        return self._call_with_config(
            lambda group: run_sync(self._judged(group)), input, config, **kwargs
        )

    def score(self, group: TrajectoryGroup) -> Sequence[Score | None]:
        """Synchronous `ascore`, from any thread, also where an event loop is running."""
        return run_sync(self.ascore(group))

    async def scores_of(self, group: TrajectoryGroup) -> Sequence[Score | None]:
        """Await `ascore`, with the scores at the evaluator's `resolution`.

        Raises:
            ConfigError: there is not one score for each run.
        """
        with only_errors(self):
            scores = await self.ascore(group)
        if len(scores) != len(group.trajectories):
            raise ConfigError(
                f"{type(self).__name__} gave {len(scores)} scores for {len(group.trajectories)} "
                f"runs as {self.key!r}, expected one each"
            )
        values = [score.value for score in scores if score is not None]
        if values and 0 < max(values) - min(values) <= self.resolution:
            mean = math.fsum(values) / len(values)
            return [None if score is None else replace(score, value=mean) for score in scores]
        return scores

    async def _judged(self, group: object) -> TrajectoryGroup:
        if not isinstance(group, TrajectoryGroup):
            raise ConfigError(
                f"{self.key}: got {group!r:.100}, expected a TrajectoryGroup; `as_group` makes one "
                "of outputs"
            )
        runs = tuple(run for run in group.trajectories if run.status != "failed")
        if not runs:
            return group
        scores = await self.scores_of(group.model_copy(update={"trajectories": runs}))
        if all(score is None for score in scores):
            raise JudgeError(
                f"{self.key}: none of the {len(runs)} runs of {group.id!r} has a score"
            )
        scored = {
            run.id: with_score(run, self.key, score)
            for run, score in zip(runs, scores, strict=True)
        }
        merged = tuple(scored.get(run.id, run) for run in group.trajectories)
        return group.model_copy(update={"trajectories": merged})


def with_score(run: Trajectory, key: str, score: Score | None) -> Trajectory:
    """`run` with `score` as its reward, and under `key` among its scores."""
    scores, judged = dict(run.scores), dict(run.metadata.get(JUDGED) or {})
    if run.reward is not None and not judged and OWN not in scores:
        scores[OWN] = run.reward
    # Remove the parts of an earlier score of the same name.
    scores = {n: v for n, v in scores.items() if n != key and not n.startswith(f"{key}/")}
    judged[key] = score.explanation if score is not None else None
    if score is not None:
        scores |= score.named(key)
    return run.model_copy(
        update={
            "reward": None if score is None else score.value,
            "scores": scores,
            "metadata": {**run.metadata, JUDGED: judged},
        }
    )


class FunctionEvaluator(GroupEvaluator):
    """An evaluator from a function (see `scoring.Evaluator`).

    Args:
        function: takes a group; returns one number (or None) per run, or the group with rewards.
        key: the score's name.

    Example::

        FunctionEvaluator(lambda group: [float(len(run.turns)) for run in group.trajectories], "n")
    """

    def __init__(self, function: Evaluator, key: str) -> None:
        super().__init__(key)
        self._function = function

    async def ascore(self, group: TrajectoryGroup) -> list[Score | None]:
        """The function's scores; a plain ``def`` runs in a thread."""
        runs = (await score_group(group, self._function)).trajectories
        return [None if run.reward is None else Score(run.reward) for run in runs]


def as_evaluator(evaluator: Evaluator) -> GroupEvaluator:
    """A `GroupEvaluator` unchanged; a function as a `FunctionEvaluator` of its name."""
    if isinstance(evaluator, GroupEvaluator):
        return evaluator
    check_evaluator(evaluator)
    name = getattr(evaluator, "__name__", type(evaluator).__name__)
    return FunctionEvaluator(evaluator, name)


def own_rewards(group: TrajectoryGroup) -> list[float | None]:
    """The rewards that the runs had before any evaluator; itself an evaluator."""
    return [
        run.scores.get(OWN, None if run.metadata.get(JUDGED) else run.reward)
        for run in group.trajectories
    ]


@cache
def _loop_of(process: int) -> tuple[asyncio.AbstractEventLoop, Thread]:
    """One event loop in a thread of its own, for all synchronous calls of a process.

    Chat models keep connections for the loop on which they were first used; with a new loop per
    call these would belong to closed loops. Threads do not survive a fork, so a child process
    starts its own.
    """
    loop = asyncio.new_event_loop()
    thread = Thread(target=_run, args=(loop,), name="langchain-art-evaluators", daemon=True)
    thread.start()
    return loop, thread


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # A task of an evaluator's own raised it, and has informed those who wait for it.
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


_lock = Lock()


def run_sync(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in the caller's context, from synchronous code."""
    with _lock:
        loop, thread = _loop_of(os.getpid())
    if thread is current_thread():
        work.close()
        raise ConfigError(
            "an evaluator was invoked synchronously from another one's asynchronous code, expected "
            "`await evaluator.ainvoke(group)` there"
        )
    future = asyncio.run_coroutine_threadsafe(_guarded(work), loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _guarded(work: Coroutine[Any, Any, _Result]) -> _Result:
    with only_errors(work):
        return await work
