"""Figures of calls by node and model: tokens, latency, and costs by list prices or server time."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from langchain_art.statistics.intervals import quantile
from langchain_art.wire import Turn
from langchain_art.wire.identifiers import Frozen

#: US dollars of a call; None: not known.
Price = Callable[[Turn], float | None]


def busy_seconds(turns: Iterable[Turn]) -> float:
    """Seconds in which at least one of our server's calls ran: their intervals, joined.

    Calls that run side by side share the engine, so their latencies are not added up.
    """
    spans = sorted(
        (turn.started_at, turn.started_at + turn.latency)
        for turn in turns
        if turn.ours and turn.started_at is not None and turn.latency is not None
    )
    total, end = 0.0, float("-inf")
    for begun, ended in spans:
        total += max(0.0, ended - max(begun, end))
        end = max(end, ended)
    return total


def prices(turns: Sequence[Turn], gpu_rate: float | None) -> tuple[list[float | None], list[str]]:
    """The US dollars of each call, None where they are not known; and what is not known, in words.

    A hosted model's tokens have the list price that genai-prices knows for the day of the call. Our
    calls share what `busy_seconds` cost at `gpu_rate` US dollars an hour, by their latency.
    """
    ours = math.fsum(turn.latency or 0.0 for turn in turns if turn.ours)
    rate = busy_seconds(turns) / 3600 * gpu_rate / ours if gpu_rate is not None and ours else None
    hosted = _hosted() if not all(turn.ours for turn in turns) else None
    found: list[float | None] = []
    unknown = Counter[str]()
    for turn in turns:
        if turn.ours:
            known = rate is not None and turn.latency is not None
            found.append(rate * turn.latency if known else None)  # type: ignore[operator]
            continue
        found.append(hosted(turn) if hosted is not None else None)
        if found[-1] is None:
            unknown[turn.model or "a model without a name"] += 1
    if unknown and hosted is None:
        return found, ["Prices of hosted models: pip install 'langchain-art[prices]'."]
    listed = ", ".join(f"{name} ({count} calls)" for name, count in unknown.most_common())
    return found, [f"No price or no token count is known of {listed}."] if unknown else []


def _hosted() -> Price | None:
    if find_spec("genai_prices") is None:
        return None
    library: Any = import_module("genai_prices")

    def price(turn: Turn) -> float | None:
        if turn.model is None or turn.usage is None:
            return None
        used = library.Usage(
            input_tokens=turn.usage.prompt_tokens, output_tokens=turn.usage.completion_tokens
        )
        at = None if turn.started_at is None else datetime.fromtimestamp(turn.started_at, UTC)
        provider, _, name = turn.model.rpartition("/")
        try:
            found = library.calc_price(
                used, name, provider_id=provider or None, genai_request_timestamp=at
            )
        except LookupError:
            return None
        return float(found.total_price)

    return price


class NodeFigures(Frozen):
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


def node_figures(turns: Sequence[Turn], costs: Sequence[float | None]) -> tuple[NodeFigures, ...]:
    """Figures of the calls of each node, for each of its models; `costs` as of `prices`."""
    grouped = defaultdict[tuple[str, str], list[tuple[Turn, float | None]]](list)
    for turn, cost in zip(turns, costs, strict=True):
        grouped[turn.label, turn.model or "-"].append((turn, cost))
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
