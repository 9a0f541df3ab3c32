"""The figures of an analysis, as values that are shown, plotted and written as JSON."""

from __future__ import annotations

from typing import Literal

from langchain_art.statistics.costs import NodeFigures
from langchain_art.training.records import Record


class VersionFigures(Record):
    """The runs of one version, or of one set of versions that work together."""

    version: str
    """``email-agent@17``, or ``critic@2 + writer@3``; ``-`` for runs without a model call."""
    runs: int
    evaluated: int
    """Runs of evaluations on held-out scenarios; the others are of training or use."""
    scenarios: int
    """Different ones; a run without a scenario is one of its own."""
    failed: int
    unscored: int
    """Runs that did not fail and have no reward. They are in neither rate nor mean."""
    successes: int
    success_rate: float | None
    """Share of the scored and the failed runs."""
    success_low: float | None
    success_high: float | None
    """Wilson's 95 % interval (`intervals.wilson`), over runs as if they were independent."""
    reward_mean: float | None
    """Mean of the scored runs' total returns."""
    reward_ci95: float | None
    """Half width, 1.96 · s/√n over scenarios, as `EvalResult.ci95`."""
    calls_mean: float
    """Model calls of a run."""
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None
    """Cost of the calls with a known price; None if no price is known."""


class ActionFigures(Record):
    """Number of times a node did something."""

    node: str
    action: str
    """The name of a tool; ``(answer)``: a reply that calls none."""
    count: int
    share: float
    """Fraction of the node's actions."""


class ErrorPattern(Record):
    """Errors that read alike once ids, numbers, quotations and paths are left out."""

    where: Literal["run", "call", "tool"]
    """``tool``: a tool's result that begins with ``Error``, as LangGraph's ToolNode writes it."""
    name: str
    """The node, or the tool; ``-`` of a run."""
    pattern: str
    count: int
    runs: int
    example: str
    """The id of a run that has it."""


class Analysis(Record):
    """Figures of some runs.

    Example::

        found = analyze(client.trajectories(1000), success=1.0)
        found.versions[-1].success_rate, found.versions[-1].success_low
    """

    runs: int
    success: float
    """The total return from which on a run counts as a success."""
    versions: tuple[VersionFigures, ...]
    """Versions in the order of their numbers."""
    nodes: tuple[NodeFigures, ...]
    actions: tuple[ActionFigures, ...]
    errors: tuple[ErrorPattern, ...]
    """The most frequent first."""
    busy_seconds: float
    """Seconds in which at least one call of our server ran, as far as its latency is known."""
    notes: tuple[str, ...] = ()
    """Notes on what the figures leave out, and why."""
