"""A trajectory (one run of a graph), a group of them, and a reward for one.

A reward is finite or refused, and ``None`` (not scored) is not ``0.0``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from langchain_art.wire.calls import Turn
from langchain_art.wire.identifiers import Finite, Id, Message, Wire

Status = Literal["completed", "failed", "interrupted", "truncated"]


class Trajectory(Wire):
    """One run of a graph on one scenario. ``reward=None``: not scored, which is not zero.

    Example::

        Trajectory(id="t-1", scenario="q-7", turns=(first, second), reward=1.0)
    """

    id: Id
    scenario: str | None = Field(default=None, max_length=256)
    turns: tuple[Turn, ...] = Field(default=(), max_length=4096)
    input: Any = None
    output: Any = None
    reward: Finite | None = None
    scores: dict[str, Finite] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    status: Status = "completed"
    error: str | None = None

    @model_validator(mode="after")
    def _extends_backwards(self) -> Trajectory:
        for index, turn in enumerate(self.turns):
            if turn.extends is not None and turn.extends >= index:
                raise ValueError(
                    f"turn {index} extends turn {turn.extends}, expected an earlier turn"
                )
        return self

    def prompt(self, index: int) -> list[Message]:
        """All messages of the prompt of turn `index`."""
        parts: list[list[Message]] = []
        turn = self.turns[index]
        while turn.extends is not None:
            earlier = self.turns[turn.extends]
            parts.append([*([earlier.reply] if earlier.reply else []), *turn.messages])
            turn = earlier
        return [*turn.messages, *(message for part in reversed(parts) for message in part)]


class TrajectoryGroup(Wire):
    """Runs of one scenario, whose rewards are compared with each other."""

    id: Id
    trajectories: tuple[Trajectory, ...] = Field(max_length=1024)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("trajectories")
    @classmethod
    def _distinct(cls, value: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        ids = [t.id for t in value]
        if len(set(ids)) != len(ids):
            raise ValueError(f"got the same trajectory twice in one group: {sorted(ids)}")
        return value


class Reward(Wire):
    """A reward for a trajectory that the server already has, or can assemble from tagged calls."""

    reward: Finite | None = None
    """Left out: the run's reward stays as it is."""
    turns: dict[str, Finite | None] = Field(default_factory=dict, max_length=4096)
    """Call id -> reward of that call alone (`Turn.reward`); None takes it back."""
    scores: dict[str, Finite] = Field(default_factory=dict)
    scenario: str | None = Field(default=None, max_length=256)
    status: Status = "completed"
    metadata: dict[str, Any] = Field(default_factory=dict)
