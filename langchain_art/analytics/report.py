"""An analysis as tables that 80 columns hold, and as an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from langchain_art.analytics.analysis import Analysis
from langchain_art.errors import ConfigError
from langchain_art.statistics.intervals import Comparison
from langchain_art.training.report import blank_figure, saved

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
    names = ("runs", "success", "95 %", "reward", "calls", "tokens", "USD")
    table = plain_table(f"Versions (success: reward ≥ {found.success:g})", ["version"], names)
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
    names = ("calls", "errors", "tokens", "p50 s", "p95 s", "USD")
    table = plain_table("Calls by node and version", ["node", "version"], names)
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
    table = plain_table("Actions", ["node", "action"], ["count", "share"])
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


def plain_table(title: str, folded: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """A table without frames: columns that may be folded, then columns of `numbers`."""
    columns = [Column(name, overflow="fold") for name in folded]
    columns += [Column(name, justify="right", no_wrap=True) for name in numbers]
    return Table(
        *columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _count(value: int) -> str:
    """``950``, ``12.3k`` or ``4.5M``; ``-`` for 0: what is known has some."""
    for unit, size in (("M", 1_000_000), ("k", 10_000)):
        if value >= size:
            return f"{value / (1_000_000 if unit == 'M' else 1000):.1f}{unit}"
    return str(value or "-")


_DARK, _LIGHT = "#c2410c", "#8aa4c8"
#: Bars of a panel; the most frequent ones, where there are more.
_MOST = 12


def analysis_plot(found: Analysis, path: str | Path) -> Path:
    """Draw an analysis into a PNG or SVG, by the ending of its name; returns `path`.

    Raises:
        ConfigError: another ending, or matplotlib is not installed.
    """
    target = Path(path)
    if target.suffix not in (".png", ".svg"):
        raise ConfigError(f"got the image {str(path)!r}, expected a name with .png or .svg")
    figure = blank_figure(10.0, 6.8, "The plot")
    ((success, reward), (actions, latency)) = figure.subplots(2, 2)
    _success(success, found)
    _reward(reward, found)
    _actions(actions, found)
    _latency(latency, found)
    for axes in (success, reward, actions, latency):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return saved(figure, target)


def _success(axes: Any, found: Analysis) -> None:
    shown = [
        (one.version, one.success_rate, one.success_low, one.success_high)
        for one in found.versions
        if one.success_rate is not None
    ]
    rates = [rate for _, rate, _, _ in shown]
    below = [rate - (low or 0.0) for _, rate, low, _ in shown]
    above = [(high or 0.0) - rate for _, rate, _, high in shown]
    axes.errorbar(range(len(shown)), rates, yerr=[below, above], color=_DARK, fmt="s", capsize=3)
    axes.set_ylim(-0.02, 1.02)
    _names(axes, [version for version, *_ in shown])
    axes.set_title(f"Success (reward ≥ {found.success:g}), Wilson 95 %", loc="left", fontsize=10)


def _reward(axes: Any, found: Analysis) -> None:
    shown = [one for one in found.versions if one.reward_mean is not None]
    means = [one.reward_mean for one in shown]
    spreads = [one.reward_ci95 or 0.0 for one in shown]
    axes.errorbar(range(len(shown)), means, yerr=spreads, color=_DARK, fmt="s", capsize=3)
    _names(axes, [one.version for one in shown])
    axes.set_title("Mean reward, 95 %", loc="left", fontsize=10)


def _actions(axes: Any, found: Analysis) -> None:
    shown = sorted(found.actions, key=lambda one: -one.count)[:_MOST][::-1]
    axes.barh([f"{one.node}: {one.action}" for one in shown], [one.count for one in shown])
    for bar in axes.patches:
        bar.set_color(_LIGHT)
    axes.set_title("Actions", loc="left", fontsize=10)


def _latency(axes: Any, found: Analysis) -> None:
    timed = [one for one in found.nodes if one.latency_p50 is not None]
    shown = sorted(timed, key=lambda one: -one.calls)[:_MOST][::-1]
    names = [f"{one.node}, {one.model}" for one in shown]
    axes.barh(names, [one.latency_p95 for one in shown], color=_LIGHT, label="p95")
    axes.barh(names, [one.latency_p50 for one in shown], color=_DARK, height=0.4, label="p50")
    axes.set_xlabel("seconds of a call", fontsize=8)
    axes.set_title("Latency", loc="left", fontsize=10)
    if shown:
        axes.legend(frameon=False, fontsize=8)


def _names(axes: Any, names: list[str]) -> None:
    axes.set_xticks(range(len(names)), names, rotation=30 if len(names) > 3 else 0, ha="center")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
