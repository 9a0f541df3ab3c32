"""Reward by step, of one fit or several: as an image, and as text for a terminal."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from langchain_art.errors import ConfigError
from langchain_art.training.results.records import EvalResult, StepRecord

#: Colours of a curve: its held-out evaluations, its training batches.
_COLOURS = (
    ("#c2410c", "#8aa4c8"),
    ("#1d4ed8", "#bfdbfe"),
    ("#15803d", "#bbf7d0"),
    ("#7e22ce", "#e9d5ff"),
    ("#a16207", "#fde68a"),
    ("#374151", "#d1d5db"),
)
_HEIGHT = 15


@dataclass(frozen=True)
class Curve:
    """The figures of one fit."""

    name: str
    """Empty: there is no other."""
    steps: Sequence[StepRecord]
    evals: Sequence[EvalResult]

    @property
    def trained(self) -> list[tuple[int, float]]:
        """(step, mean reward of its batch)."""
        return [(r.step, r.reward_mean) for r in self.steps if r.reward_mean is not None]

    @property
    def held_out(self) -> dict[int, tuple[EvalResult, float]]:
        """Step -> the evaluation after it, and its mean."""
        found = [(e, e.mean) for e in self.evals if e.mean is not None]
        return {
            e.step or 0: (e, mean) for e, mean in sorted(found, key=lambda one: one[0].step or 0)
        }


def reward_plot(
    history: Sequence[StepRecord],
    path: str | Path,
    before: EvalResult | None = None,
    after: EvalResult | None = None,
    *,
    evals: Sequence[EvalResult] = (),
    title: str = "Reward during training",
) -> Path:
    """Draw the steps' mean rewards, and held-out evaluations with 95 % intervals; returns `path`.

    Args:
        history: steps, as in ``FitResult.history``.
        path: where the PNG goes; its directory is made if it is missing.
        before: evaluation before the first step.
        after: evaluation after the last.
        evals: all evaluations (``FitResult.evals``), where there are more than those two.
        title: above the figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    last = history[-1].step if history else 0
    placed = {
        default if result.step is None else result.step: result
        for result, default in [(before, 0), *((e, 0) for e in evals), (after, last)]
        if result is not None
    }
    held_out = [one.model_copy(update={"step": step}) for step, one in placed.items()]
    return draw([Curve("", history, held_out)], path, title)


def draw(curves: Sequence[Curve], path: str | Path, title: str) -> Path:
    """Draw curves into one PNG; raises ConfigError if matplotlib is not installed."""
    try:
        figures: Any = import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "The reward plot needs matplotlib: pip install 'langchain-art[examples]'. Without it, "
            "`langchain-art curve` draws in the terminal."
        ) from error
    figure: Any = figures.Figure(figsize=(7.2, 4.0), dpi=150, facecolor="white")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        dark, light = _COLOURS[number % len(_COLOURS)]
        prefix = f"{curve.name}: " if curve.name else ""
        if trained := curve.trained:
            axes.plot(
                [step for step, _ in trained],
                [mean for _, mean in trained],
                color=light,
                linewidth=1.6,
                marker="o",
                markersize=3,
                label=f"{prefix}training batch, mean",
            )
        if held_out := curve.held_out:
            found = list(held_out.values())
            axes.errorbar(
                list(held_out),
                [mean for _, mean in found],
                yerr=[one.ci95 or 0.0 for one, _ in found],
                color=dark,
                linewidth=1.6,
                marker="s",
                markersize=5,
                capsize=3,
                label=f"{prefix}held out, mean ± 95 % CI (n={found[-1][0].n})",
            )
    axes.set_xlabel("training step")
    axes.set_ylabel("reward (mean per run)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, loc="best")
    figure.tight_layout()
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    return target


def text_plot(curves: Sequence[Curve], width: int) -> str:
    """The curves in letters: capital ones for held-out means, small ones for training batches."""
    marks = [string.ascii_uppercase[number % 26] for number in range(len(curves))]
    points = [
        point
        for curve, mark in zip(curves, marks, strict=True)
        for point in [
            *((step, mean, mark.lower()) for step, mean in curve.trained),
            *((step, mean, mark) for step, (_, mean) in curve.held_out.items()),
        ]
    ]
    if not points:
        return "No rewards yet."
    low, high = min(mean for _, mean, _ in points), max(mean for _, mean, _ in points)
    last, span = max(step for step, _, _ in points) or 1, (high - low) or 1.0
    columns = max(20, width - 12)
    rows = [[" "] * columns for _ in range(_HEIGHT)]
    for step, mean, mark in sorted(points, key=lambda point: point[2].isupper()):
        row = round((high - mean) / span * (_HEIGHT - 1))
        rows[row][round(step / last * (columns - 1))] = mark
    lines: list[str] = []
    for number, row in enumerate(rows):
        named = number in (0, _HEIGHT // 2, _HEIGHT - 1)
        value = f"{high - span * number / (_HEIGHT - 1):.3f}" if named else ""
        lines.append(f"{value:>9} {'┤' if named else '│'}{''.join(row)}".rstrip())
    lines.append(" " * 10 + "└" + "─" * columns)
    lines.append(" " * 11 + f"0{f'step {last}':>{columns - 1}}")
    return "\n".join([*lines, *map(_legend, curves, marks)])


def _legend(curve: Curve, mark: str) -> str:
    parts: list[str] = []
    if held_out := list(curve.held_out.values()):
        best = max(held_out, key=lambda one: one[1])[0]
        parts.append(
            f"{mark} held out {held_out[0][1]:.3f} → {held_out[-1][1]:.3f}, best {best.mean:.3f} "
            f"({best.version})"
        )
    if trained := curve.trained:
        parts.append(f"{mark.lower()} training {trained[0][1]:.3f} → {trained[-1][1]:.3f}")
    return f"{curve.name}: {'; '.join(parts) or 'no rewards yet'}".removeprefix(": ")
