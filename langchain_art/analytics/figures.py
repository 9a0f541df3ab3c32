"""The figures of an analysis, as values that are shown, plotted and written as JSON."""

from __future__ import annotations

from typing import Literal

from langchain_art.training.results import Record


class VersionFigures(Record):
    """The runs of one version, or of one set of versions that work together."""

    version: str
    """``email-agent@17``, or ``critic@2 + writer@3``; ``-`` for runs without a model call."""
    runs: int
    evaluated: int
    """Of `runs`: those of evaluations on held-out scenarios; the others are of training or use."""
    scenarios: int
    """Different ones; a run without a scenario is one of its own."""
    failed: int
    unscored: int
    """Runs that did not fail and have no reward. They are in neither rate nor mean."""
    successes: int
    success_rate: float | None
    """Of the scored and the failed runs."""
    success_low: float | None
    success_high: float | None
    """Wilson's 95 % interval (`intervals.wilson`), over runs as if they were independent."""
    reward_mean: float | None
    """Of the scored runs' total returns."""
    reward_ci95: float | None
    """Half width, 1.96 · s/√n over scenarios, as `EvalResult.ci95`."""
    calls_mean: float
    """Model calls of a run."""
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None
    """Of the calls whose price is known; None: of none."""


class NodeFigures(Record):
    """The calls of one node with one model."""

    node: str
    model: str
    calls: int
    errors: int
    excluded: int
    """Calls that the graph threw away (retried, unchosen …); actions leave them out."""
    prompt_tokens: int
    completion_tokens: int
    latency_p50: float | None
    latency_p95: float | None
    """Seconds; None where no call has a latency."""
    cost_usd: float | None
    unpriced: int
    """Calls whose price is not known."""


class ActionFigures(Record):
    """How often a node did something."""

    node: str
    action: str
    """The name of a tool; ``(answer)``: a reply that calls none."""
    count: int
    share: float
    """Of the node's actions."""


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
    """What some runs came to.

    Example::

        found = analyze(client.trajectories(1000), success=1.0)
        found.versions[-1].success_rate, found.versions[-1].success_low
    """

    runs: int
    success: float
    """The total return from which on a run counts as a success."""
    versions: tuple[VersionFigures, ...]
    """In the order of their numbers."""
    nodes: tuple[NodeFigures, ...]
    actions: tuple[ActionFigures, ...]
    errors: tuple[ErrorPattern, ...]
    """The most frequent first."""
    busy_seconds: float
    """In which at least one call of our server ran, as far as its latency is known."""
    notes: tuple[str, ...] = ()
    """What the figures leave out, and why."""


class Comparison(Record):
    """Whether one version's runs are better than another's."""

    before: str
    after: str
    paired: bool
    """By scenario: both have runs of at least two same ones, and only these are compared."""
    scenarios: int
    """Pairs; unpaired, scenarios of both."""
    left_out: int
    """Scenarios that only one of them has runs of, where it is paired."""
    difference: float
    """Of the mean rewards, after minus before, each scenario weighing the same."""
    ci95: float | None
    p_value: float
    test: str
    """Which test it is, in words."""

    @property
    def significant(self) -> bool:
        """Whether chance alone would give such a difference in less than 5 % of cases."""
        return self.p_value < 0.05

    def __str__(self) -> str:
        spread = "" if self.ci95 is None else f" ± {self.ci95:.3f}"
        verdict = "significant" if self.significant else "not significant"
        found = f"{self.difference:+.3f}{spread}, p = {self.p_value:.3g}, {verdict} at 5 %"
        return f"{self.before} → {self.after}: {found} ({self.scenarios} scenarios; {self.test})"
