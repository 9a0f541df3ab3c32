"""Plain functions as evaluators."""

from __future__ import annotations

from langchain_art.evaluators.base import GroupEvaluator, Score, own_reward
from langchain_art.evaluators.scoring import Evaluator, score_group
from langchain_art.wire import TrajectoryGroup


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
    name = getattr(evaluator, "__name__", type(evaluator).__name__)
    return FunctionEvaluator(evaluator, name)


def own_rewards(group: TrajectoryGroup) -> list[float | None]:
    """The rewards that the runs had before any evaluator; itself an evaluator."""
    return [own_reward(run) for run in group.trajectories]
