"""Score groups with an evaluator; a group that it cannot score is counted, never scored 0."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from pydantic import TypeAdapter, ValidationError

from langchain_art._callables import call
from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire import Trajectory, TrajectoryGroup
from langchain_art.wire.identifiers import MAX_REWARD, RewardValue, escaped
from langchain_art.wire.trajectories import storable

Scores: TypeAlias = "TrajectoryGroup | Iterable[float | None]"
Evaluator: TypeAlias = "Callable[[TrajectoryGroup], Scores | Awaitable[Scores]]"
"""Takes a group (without its failed runs) and returns it with rewards, or one reward per run.

The scenario is ``group.metadata["scenario"]`` (see `scenarios.portable`); what the graph of a run
returned is its `output`."""


_NUMBERS: TypeAdapter[dict[str, float]] = TypeAdapter(dict[str, RewardValue])


class _WrongScores(ConfigError):
    pass


@dataclass(frozen=True)
class ScoredGroups:
    """The groups that were scored, in order, and how many were not."""

    groups: list[TrajectoryGroup]
    unjudged: int
    first_error: str | None


async def score_groups(
    groups: Sequence[TrajectoryGroup],
    evaluator: Evaluator,
    *,
    concurrency: int = 16,
    on_done: Callable[[], None] | None = None,
    needed: bool = True,
) -> ScoredGroups:
    """Score groups, at most `concurrency` at once. A plain ``def`` evaluator runs in threads.

    `on_done` is called after each group. `needed`: False if others have rewards, so that an
    evaluator that raises for all of these is counted, and not raised on.

    Failed runs are not shown to the evaluator, and stay in their group as they are.

    Raises:
        ArtError: the evaluator raised for every group, and is `needed`.
        ConfigError: it returned something that is no score for the group's runs.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(group: TrajectoryGroup) -> TrajectoryGroup | Exception:
        async with slots:
            try:
                return await score_group(group, evaluator)
            except _WrongScores:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a judge raises, its group is counted
                return error
            finally:
                if on_done is not None:
                    on_done()

    outcomes = await asyncio.gather(*(one(group) for group in groups))
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    first = escaped(f"{type(errors[0]).__name__}: {errors[0]}") if errors else None
    if needed and errors and len(errors) == len(outcomes):
        raise ArtError(
            f"The evaluator raised for all {len(errors)} groups, so there is nothing to learn "
            f"from. The first: {first}"
        ) from errors[0]
    judged = [outcome for outcome in outcomes if isinstance(outcome, TrajectoryGroup)]
    return ScoredGroups(judged, len(errors), first)


def check_evaluator(evaluator: object) -> Evaluator:
    """`evaluator` as it is; ConfigError of a name, or of a class that was not called."""
    if isinstance(evaluator, type) or not (callable(evaluator) or hasattr(evaluator, "ainvoke")):
        raise ConfigError(
            f"got {evaluator!r:.200} as an evaluator, expected a function of a group of runs, or "
            "an object such as RulerEvaluator(…)"
        )
    return cast("Evaluator", evaluator)


def cost_of(evaluator: object, before: float | None = None) -> float | None:
    """US dollars that an evaluator has spent since it had spent `before`; None: it does not know.

    It is asked for its `cost`, which `GroupEvaluator` has.
    """
    found = getattr(evaluator, "cost", None)
    return float(found) - (before or 0.0) if isinstance(found, int | float) else None


async def score_group(group: TrajectoryGroup, evaluator: Evaluator) -> TrajectoryGroup:
    """Score one group as `score_groups` does; raises whatever the evaluator raises."""
    runs = [t for t in group.trajectories if t.status != "failed"]
    if not runs:
        return group
    shown = group.model_copy(update={"trajectories": tuple(runs)})
    scores = cast("Scores", await call(getattr(evaluator, "ainvoke", evaluator), shown))
    if not isinstance(scores, TrajectoryGroup):
        if isinstance(scores, Iterator):  # a generator scores while it is read, and may raise
            scores = await call(list, scores)
        scores = shown.model_copy(update={"trajectories": _rescored(runs, scores)})
    _check_numbers(scores)
    scored = {t.id: t for t in scores.trajectories}
    if set(scored) != {run.id for run in runs}:
        raise _WrongScores(
            f"The evaluator returned a group of other runs than it was given ({group.id!r}); "
            "return the same runs, each with its reward (or None)."
        )
    merged = tuple(storable(scored.get(t.id, t)) for t in group.trajectories)
    return group.model_copy(update={"trajectories": merged, "metadata": scores.metadata})


def _check_numbers(group: TrajectoryGroup) -> None:
    """Raise ValueError unless what was copied into a group's runs may stand there."""
    try:
        for run in group.trajectories:
            _NUMBERS.validate_python(dict(run.scores))
            rewards = {"reward": run.reward}
            rewards |= {f"turns.{n}.reward": turn.reward for n, turn in enumerate(run.turns)}
            _NUMBERS.validate_python({k: v for k, v in rewards.items() if v is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"the evaluator's rewards and scores are not all finite numbers within "
            f"±{MAX_REWARD:g}: {first['loc'][0]}: {first['msg']}"
        ) from error


def _rescored(runs: list[Trajectory], scores: object) -> list[Trajectory]:
    try:
        given = list(cast("Sequence[float | None]", scores))
        if any(isinstance(one, str | bytes) for one in given):
            raise TypeError("a text is no number")
        rewards = [None if one is None else float(one) for one in given]
    except (TypeError, ValueError) as error:
        raise _WrongScores(
            f"The evaluator returned {scores!r:.200}, expected a TrajectoryGroup or a sequence of "
            "numbers, one per run"
        ) from error
    if len(rewards) != len(runs):
        raise _WrongScores(
            f"The evaluator returned {len(rewards)} scores for {len(runs)} runs, expected one each"
        )
    return [
        run.model_copy(update={"reward": reward}) for run, reward in zip(runs, rewards, strict=True)
    ]
