"""The whole of a fit: its steps, its evaluations, and what they add up to."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from langchain_art.training.results.records import (
    EvalResult,
    Record,
    Rollback,
    StepRecord,
    sole,
)
from langchain_art.wire import NodeReport


class FitResult(Record):
    """The result of a fit.

    Example::

        result = await trainer.fit(rollout, train, steps=50, eval_scenarios=held_out)
        result.before.mean, result.after.mean, result.adapter   # 0.31, 0.84, "email-agent@50"
    """

    fit_id: str
    versions: dict[str, int]
    """Version that serves now, by policy."""
    before: EvalResult | None = None
    after: EvalResult | None = None
    best: EvalResult | None = None
    """The evaluation with the highest mean; its versions are pinned on the server."""
    history: tuple[StepRecord, ...] = ()
    evals: tuple[EvalResult, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    stopped: str = ""
    """Reason why the fit ended before its steps did; empty: it did not."""

    def __repr__(self) -> str:
        """Format in a line, for a notebook or a print: the history alone is kilobytes."""
        parts = [" + ".join(self.adapters), f"{len(self.history)} steps"]
        if self.before is not None and self.after is not None:
            parts.append(f"held out {self.before} → {self.after}")
        if self.best is not None and self.best.version != " + ".join(self.adapters):
            parts.append(f"best {self.best}  {self.best.version}")
        return f"<FitResult {self.fit_id}: {', '.join(parts)}>"

    __str__ = __repr__

    @property
    def policy(self) -> str:
        """The single policy's name. Raises ConfigError if there are several."""
        return sole(self.versions)[0]

    @property
    def version(self) -> int:
        """The version that serves now. Raises ConfigError if there are several policies."""
        return sole(self.versions)[1]

    @property
    def adapter(self) -> str:
        """The final version's name: ``email-agent@50``. Raises ConfigError if there are several."""
        policy, version = sole(self.versions)
        return f"{policy}@{version}"

    @property
    def adapters(self) -> tuple[str, ...]:
        """The final version's name of each policy."""
        return tuple(f"{policy}@{version}" for policy, version in self.versions.items())

    @property
    def excluded(self) -> dict[str, int]:
        """Counts of what all steps excluded, by reason."""
        return _sums(record.excluded for record in self.history)

    @property
    def seconds(self) -> float:
        """Seconds of all steps and evaluations."""
        steps = sum(one.seconds.get("total", 0.0) for one in self.history)
        return steps + sum(one.seconds for one in self.evals)

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of all steps and evaluations: ``prompt``, ``completion`` and ``trained``."""
        return _sums(one.tokens for one in (*self.history, *self.evals))

    @property
    def judge_cost(self) -> float | None:
        """US dollars that the judge took in all; None where the evaluator does not know it."""
        costs = [one.judge_cost for one in (*self.history, *self.evals)]
        spent = [cost for cost in costs if cost is not None]
        return math.fsum(spent) if spent else None

    @property
    def nodes(self) -> dict[str, NodeReport]:
        """Contribution of each node to all steps."""
        return total_nodes(record.nodes for record in self.history)


def total_nodes(reports: Iterable[Mapping[str, NodeReport]]) -> dict[str, NodeReport]:
    """Node reports of several steps as one: counts added, advantages averaged over tokens."""
    by_node: defaultdict[str, list[NodeReport]] = defaultdict(list)
    for nodes in reports:
        for name, report in nodes.items():
            by_node[name].append(report)
    return {name: _total(found) for name, found in by_node.items()}


def _total(reports: Sequence[NodeReport]) -> NodeReport:
    tokens = sum(report.tokens for report in reports)
    weight = tokens or 1
    return NodeReport(
        calls=sum(report.calls for report in reports),
        tokens=tokens,
        advantage_mean=sum(one.advantage_mean * one.tokens for one in reports) / weight,
        advantage_abs=sum(one.advantage_abs * one.tokens for one in reports) / weight,
        excluded=_sums(report.excluded for report in reports),
    )


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
