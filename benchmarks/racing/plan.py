"""What the racers are told, what they say, and how races are compared; the standard library only.

A racer is ``python -m benchmarks.racing.NAME FOLDER``. It reads ``FOLDER/told.json`` (`Told`),
trains, and after every step writes a line of JSON (`say`) and waits for a line on standard input
before it goes on. Standard input that ends is the end of its race.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Told:
    """A racer's task.

    Attributes:
        base: folder of the base model.
        messages: how many training messages there are.
        order: their numbers, `groups` a step, in the order of the steps.
        rate: the learning rate, the same in every step; ours chooses its own.
        seed: of the messages, their order, the adapter's first weights and what is drawn.
        steps: most steps.
        groups: messages in a step.
        size: runs of each.
        max_tokens: of one reply.
        system: the system prompt.
        replies: of the departments, in their order.
    """

    base: str
    messages: int
    order: Sequence[int]
    rate: float
    seed: int
    steps: int
    groups: int
    size: int
    max_tokens: int
    system: str
    replies: Sequence[str]

    def write(self, folder: Path) -> None:
        """For `read`, by the racer."""
        (folder / "told.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Told:
        """What `write` has written."""
        return cls(**json.loads((folder / "told.json").read_text()))


def say(step: int, adapter: Path, reward: float | None) -> None:
    """Hand an adapter over, with the mean reward of the step's runs, and wait.

    Raises:
        SystemExit: the race is over.
    """
    print(json.dumps({"step": step, "adapter": str(adapter), "reward": reward}), flush=True)
    if not sys.stdin.readline():
        raise SystemExit(0)


@dataclass(frozen=True)
class Mark:
    """An adapter on the way.

    Attributes:
        step: its number.
        cpu: CPU seconds of all the racer's processes until then.
        own: of these, those of the process that was started, without its children: of ours the
            agent and the trainer, as the server is a child; of TRL all.
        trained: mean reward of the step's runs.
        reward: held out.
    """

    step: int
    cpu: float
    own: float
    trained: float | None
    reward: float


@dataclass(frozen=True)
class Course:
    """One race of one racer, up to the first mark that reaches the target, or to a limit.

    Attributes:
        racer: its name.
        rate: the learning rate.
        seed: of the messages and what is drawn.
        marks: in their order, at least one.
        reached: whether the last mark has the target.
    """

    racer: str
    rate: float
    seed: int
    marks: Sequence[Mark]
    reached: bool

    @property
    def cpu(self) -> float:
        """CPU seconds until the target; of a course that did not reach it, those that it took."""
        return self.marks[-1].cpu

    @property
    def per_step(self) -> float:
        """CPU seconds a step between its marks, the start not counted, if there are two marks."""
        first, last = self.marks[0], self.marks[-1]
        return (last.cpu - first.cpu) / max(1, last.step - first.step)


def best_rate(courses: Iterable[Course]) -> float:
    """The learning rate of the course that reached the target for the fewest CPU seconds.

    If none did: of the one with the highest reward at any mark.
    """
    courses = list(courses)
    reached = [one for one in courses if one.reached]
    if reached:
        return min(reached, key=lambda one: one.cpu).rate
    return max(courses, key=lambda one: max(mark.reward for mark in one.marks)).rate


@dataclass(frozen=True)
class Ratio:
    """A racer's CPU seconds over ours, and what the value is to the true one."""

    value: float
    bound: Literal["equal", "at least", "at most", "unknown"]


def over(theirs: Sequence[Course], ours: Sequence[Course]) -> Ratio:
    """The sum of their CPU seconds until the target over ours, over the same seeds.

    A course that stopped short of the target would have taken more: theirs make the ratio a lower
    bound, ours an upper one, both leave it unknown.
    """
    seeds = [one.seed for one in ours]
    if not seeds or [one.seed for one in theirs] != seeds:
        raise ValueError(
            f"got seeds {[one.seed for one in theirs]}, expected those of ours, {seeds}"
        )
    value = sum(one.cpu for one in theirs) / sum(one.cpu for one in ours)
    short = not all(one.reached for one in theirs), not all(one.reached for one in ours)
    bounds: dict[tuple[bool, bool], Any] = {
        (False, False): "equal",
        (True, False): "at least",
        (False, True): "at most",
        (True, True): "unknown",
    }
    return Ratio(value, bounds[short])
