"""Groups of runs for the evaluators' tests, and evaluators that say what they are told to."""

from collections.abc import Sequence
from typing import Any

from langchain_art.errors import JudgeError
from langchain_art.evaluators import GroupEvaluator, Score
from langchain_art.wire import Message, Trajectory, TrajectoryGroup, Turn


def calls(*names: str, arguments: str = "{}") -> Message:
    """An assistant's message that calls tools."""
    functions = [{"function": {"name": name, "arguments": arguments}} for name in names]
    return {"role": "assistant", "content": None, "tool_calls": functions}


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "1", "content": text}


def run(id: str, *replies: Message, **fields: Any) -> Trajectory:
    turns = tuple(
        Turn(reply=reply, extends=n - 1 if n else None) for n, reply in enumerate(replies)
    )
    return Trajectory(id=id, turns=turns, **fields)


def group(*runs: Trajectory, id: str = "g", **scenario: Any) -> TrajectoryGroup:
    metadata = {"scenario": scenario} if scenario else {}
    return TrajectoryGroup(id=id, trajectories=runs, metadata=metadata)


class Says(GroupEvaluator):
    """Gives the scores that it was made with; an error instead raises."""

    def __init__(self, key: str, *values: float | None, error: Exception | None = None) -> None:
        super().__init__(key)
        self.values = values
        self.error = error
        self.shown: list[list[str]] = []

    async def ascore(self, group: TrajectoryGroup) -> Sequence[Score | None]:
        self.shown.append([run.id for run in group.trajectories])
        if self.error is not None:
            raise self.error
        return [None if v is None else Score(v, f"{self.key} says so") for v in self.values]


def no_verdict() -> JudgeError:
    return JudgeError("the judge gave no verdict")
