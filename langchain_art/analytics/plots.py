"""An analysis as an image: success, reward and latency by version, and what the nodes did."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from langchain_art.analytics.figures import Analysis
from langchain_art.errors import ConfigError

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
    try:
        figures: Any = import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "The plot needs matplotlib: pip install 'langchain-art[examples]'."
        ) from error
    figure: Any = figures.Figure(figsize=(10.0, 6.8), dpi=130, facecolor="white")
    ((success, reward), (actions, latency)) = figure.subplots(2, 2)
    _success(success, found)
    _reward(reward, found)
    _actions(actions, found)
    _latency(latency, found)
    for axes in (success, reward, actions, latency):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    return target


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
