"""Exported form of one run, for any destination: its trajectory, its spans, its labels."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from langchain_art.wire import Trajectory
from langchain_art.wire.identifiers import Frozen

Environment = Literal["train", "eval", "production"]
Kind = Literal["graph", "node", "tool", "model"]


class SpanRecord(Frozen):
    """A node, a tool or a model call of a run. Times are in seconds since the epoch."""

    number: int
    """Place among the run's spans, from 0."""
    parent: int | None
    """The number of the span around it; None: the run itself."""
    kind: Kind
    name: str
    started_at: float
    ended_at: float | None = None
    """None: it had not ended when the run did."""
    first_token_at: float | None = None
    turn: int | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Sampling parameters of a model call (`attributes.PARAMETERS`)."""
    path: tuple[str, ...] = ()
    """Names of the nodes around it and its own, outermost first."""
    namespace: str = ""
    """LangGraph's checkpoint namespace: tells branches of one node apart."""
    attempt: int = 1
    outcome: Literal["ok", "error", "interrupted"] | None = None
    error: str | None = None
    input: Any = None
    output: Any = None


class Experiment(Frozen):
    """One evaluation of one version, as Langfuse compares them."""

    id: str
    name: str
    metadata: dict[str, Any] = Field(default_factory=dict)


class Labels(Frozen):
    """Labels of a run at its destination."""

    name: str
    """The agent's name, which the trace and its root get."""
    environment: Environment
    session: str | None = None
    """Runs that belong together: the group's, or a thread's."""
    user: str | None = None
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] = Field(default_factory=dict)
    experiment: Experiment | None = None


class ExportedRun(Frozen):
    """One run: what a spool keeps and a destination is given."""

    trajectory: Trajectory
    spans: tuple[SpanRecord, ...]
    """Spans in the order of their start, each after the one around it."""
    labels: Labels
    excluded: tuple[str | None, ...] = ()
    """Reason for which a step does not train a turn, for each; None where it does. Empty: no step
    did."""
    trained_tokens: int | None = None
    """None: not known, or no step took the run."""

    @property
    def started_at(self) -> float:
        """Seconds since the epoch; 0.0 for a run in which nothing happened."""
        return min((span.started_at for span in self.spans), default=0.0)

    @property
    def ended_at(self) -> float:
        """Seconds since the epoch, of the last of its spans."""
        return max((span.ended_at or span.started_at for span in self.spans), default=0.0)

    @property
    def version(self) -> str | None:
        """The versions that sampled it: ``email-agent@17``; None if none is ours."""
        ours = {turn.model for turn in self.trajectory.turns if turn.ours and turn.model}
        return " + ".join(sorted(ours)) or None


class ExportBatch(Frozen):
    """Content of one file of a spool, sent in one request."""

    runs: tuple[ExportedRun, ...]
    experiments: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Langfuse's experiment id -> scores of it as a whole."""
