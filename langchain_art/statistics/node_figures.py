"""Calls by node and model: tokens, latency, cost."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from langchain_art.statistics.intervals import quantile
from langchain_art.wire import Turn
from langchain_art.wire.calls import label


class NodeFigures(BaseModel):
    """The calls of one node with one model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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


def node_figures(turns: Sequence[Turn], costs: Sequence[float | None]) -> tuple[NodeFigures, ...]:
    """Figures of the calls of each node, for each of its models.

    Args:
        turns: of any runs.
        costs: US dollars of each (`costs.prices`); None: not known.
    """
    grouped = defaultdict[tuple[str, str], list[tuple[Turn, float | None]]](list)
    for turn, cost in zip(turns, costs, strict=True):
        grouped[label(turn), turn.model or "-"].append((turn, cost))
    return tuple(
        _figures(node, model, grouped[node, model])
        for node, model in sorted(grouped, key=lambda key: (key[0], in_order(key[1])))
    )


def _figures(node: str, model: str, calls: Sequence[tuple[Turn, float | None]]) -> NodeFigures:
    turns = [turn for turn, _ in calls]
    latencies = sorted(turn.latency for turn in turns if turn.latency is not None)
    used = [turn.usage for turn in turns if turn.usage]
    return NodeFigures(
        node=node,
        model=model,
        calls=len(turns),
        errors=sum(turn.error is not None for turn in turns),
        excluded=sum(turn.excluded_because is not None for turn in turns),
        prompt_tokens=sum(one.prompt_tokens for one in used),
        completion_tokens=sum(one.completion_tokens for one in used),
        latency_p50=quantile(latencies, 0.5) if latencies else None,
        latency_p95=quantile(latencies, 0.95) if latencies else None,
        cost_usd=known_sum(cost for _, cost in calls),
        unpriced=sum(cost is None for _, cost in calls),
    )


def known_sum(costs: Iterable[float | None]) -> float | None:
    """The sum of what is known; None: nothing is."""
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None


def in_order(version: str) -> list[tuple[str, int]]:
    """A key that sorts ``p@9`` before ``p@10``."""
    return [(text, int(number or 0)) for text, number in re.findall(r"([^\d]+)(\d*)", version)]
