"""A trace as it was stored, whoever stored it: its model calls in order, and its score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from langchain_art.wire import Message
from langchain_art.wire.identifiers import MAX_REWARD


class Unreadable(Exception):
    """A trace that cannot be read; its only argument is a key of `REASONS`."""


@dataclass(frozen=True)
class StoredCall:
    """One model call."""

    messages: Sequence[Message]
    reply: Message
    tools: Sequence[dict[str, Any]] = ()
    call_id: str | None = None
    """The completion's id, if the trace has it."""
    model: str | None = None
    node: str | None = None
    excluded_because: str | None = None
    """Reason for which the graph discarded the reply (`Turn.excluded_because`); None: it did not,
    or the store does not tell."""


@dataclass(frozen=True)
class StoredTrace:
    """One run of a graph."""

    id: str
    """The store's."""
    input: Any
    calls: Sequence[StoredCall]
    output: Any = None
    run: str | None = None
    """The id of the run that it shows (`Trajectory.id`), if langchain-art exported it."""
    scenario: str | None = None
    score: float | None = None
    """The mean of what people gave it."""
    failed: bool = False


def score_of(given: Sequence[Any]) -> float | None:
    """The mean of what people gave a run; None: nothing. Raises Unreadable ("no_score")."""
    try:
        numbers = [float(one) for one in given]
    except (TypeError, ValueError, OverflowError) as error:
        raise Unreadable("no_score") from error
    if not all(abs(one) <= MAX_REWARD for one in numbers):  # NaN is not
        raise Unreadable("no_score")
    return fmean(numbers) if numbers else None


@dataclass
class Read:
    """Traces that a store gave, and how many could not be read, by reason (`REASONS`)."""

    traces: list[StoredTrace] = field(default_factory=list[StoredTrace])
    unreadable: dict[str, int] = field(default_factory=dict[str, int])

    def leave_out(self, reason: str) -> None:
        """Count a trace that cannot be read."""
        self.unreadable[reason] = self.unreadable.get(reason, 0) + 1


#: Why a trace is not read.
REASONS = {
    "no_calls": "have no model call",
    "no_root": "have no root: it is older than --since, or not visible yet",
    "no_score": f"have a score that is no finite number within ±{MAX_REWARD:g}",
    "unknown_shape": "have a prompt or a reply that is no chat message",
}
