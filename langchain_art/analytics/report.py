"""An analysis as tables that 80 columns hold."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from langchain_art.analytics.figures import Analysis
from langchain_art.statistics.intervals import Comparison

#: Error patterns that are listed; all are in the JSON.
_LISTED = 10


def analysis_view(found: Analysis, compared: Sequence[Comparison] = ()) -> Group:
    """Tables and notes; comparisons below."""
    parts: list[RenderableType] = [versions_table(found)]
    if found.nodes:
        parts += [nodes_table(found), actions_table(found)]
    if found.errors:
        parts.append(errors_table(found))
    lines = [*found.notes, *(f"{one}" for one in compared)]
    lines += [
        f"Fewer than 6 pairs cannot be significant: {one.before} and {one.after} share "
        f"{one.scenarios} scenarios."
        for one in compared
        if one.paired and one.scenarios < 6
    ]
    return Group(*parts, *(Text(line) for line in lines))


def versions_table(found: Analysis) -> Table:
    """Success, reward, calls, tokens and cost by version."""
    table = plain_table(f"Versions (success: reward ≥ {found.success:g})", ["version"])
    for name in ("runs", "success", "95 %", "reward", "calls", "tokens", "USD"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.versions:
        interval = "-"
        if one.success_low is not None and one.success_high is not None:
            interval = f"{one.success_low:.2f}-{one.success_high:.2f}"
        spread = "" if one.reward_ci95 is None else f" ± {one.reward_ci95:.2f}"
        table.add_row(
            escape(one.version),
            f"{one.runs}" + (f", {one.failed} failed" if one.failed else ""),
            _number(one.success_rate, ".2f"),
            interval,
            _number(one.reward_mean, ".3f") + spread,
            f"{one.calls_mean:.1f}",
            _count(one.prompt_tokens + one.completion_tokens),
            _number(one.cost_usd, ".4g"),
        )
    return table


def nodes_table(found: Analysis) -> Table:
    """Calls, tokens, latency and cost by node and version."""
    table = plain_table("Calls by node and version", ["node", "version"])
    for name in ("calls", "errors", "tokens", "p50 s", "p95 s", "USD"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.nodes:
        table.add_row(
            escape(one.node),
            escape(one.model),
            str(one.calls),
            str(one.errors or "-"),
            f"{_count(one.prompt_tokens)} + {_count(one.completion_tokens)}",
            _number(one.latency_p50, ".2f"),
            _number(one.latency_p95, ".2f"),
            _number(one.cost_usd, ".4g"),
        )
    return table


def actions_table(found: Analysis) -> Table:
    """Table of how often each node called which tool."""
    table = plain_table("Actions", ["node", "action"])
    table.add_column("count", justify="right")
    table.add_column("share", justify="right")
    for one in found.actions:
        table.add_row(escape(one.node), escape(one.action), str(one.count), f"{one.share:.0%}")
    return table


def errors_table(found: Analysis) -> Table:
    """The most frequent error patterns."""
    more = len(found.errors) - _LISTED
    table = plain_table("Errors" + (f" ({more} more: --json)" if more > 0 else ""), ["where"])
    table.add_column("message", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("run", overflow="fold")
    for one in found.errors[:_LISTED]:
        where = one.where if one.name == "-" else f"{one.where} {one.name}"
        table.add_row(escape(where), escape(one.pattern), str(one.count), escape(one.example[:8]))
    return table


def plain_table(title: str, folded: Sequence[str]) -> Table:
    """A table without frames, whose columns `folded` may be folded."""
    columns = [Column(name, overflow="fold") for name in folded]
    return Table(
        *columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _count(value: int) -> str:
    """``950``, ``12.3k`` or ``4.5M``."""
    for unit, size in (("M", 1_000_000), ("k", 10_000)):
        if value >= size:
            return f"{value / (1_000_000 if unit == 'M' else 1000):.1f}{unit}"
    return str(value)
