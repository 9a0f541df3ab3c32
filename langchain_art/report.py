"""What a fit came to, for people: a figure and a table."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.table import Table

from langchain_art.errors import ConfigError
from langchain_art.history import EvalResult, FitResult, StepRecord

_TRAIN = "#8aa4c8"
_HELD_OUT = "#c2410c"


def reward_plot(
    history: Sequence[StepRecord],
    path: str | Path,
    before: EvalResult | None = None,
    after: EvalResult | None = None,
    *,
    evals: Sequence[EvalResult] = (),
    title: str = "Reward during training",
) -> Path:
    """Draw each step's mean reward, and the held-out evaluations with their 95 % intervals.

    Args:
        history: steps, as in ``FitResult.history``.
        path: where the PNG goes; its directory is made if it is missing.
        before: evaluation before the first step.
        after: evaluation after the last.
        evals: all evaluations (``FitResult.evals``), where there are more than those two.
        title: above the figure.

    Returns:
        `path`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        figures: Any = import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "The reward plot needs matplotlib: pip install 'langchain-art[examples]'"
        ) from error
    figure: Any = figures.Figure(figsize=(7.2, 4.0), dpi=150, facecolor="white")
    axes = figure.add_subplot()
    _draw_steps(axes, history)
    _draw_evals(axes, _placed(history, before, after, evals))
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


def _placed(
    history: Sequence[StepRecord],
    before: EvalResult | None,
    after: EvalResult | None,
    evals: Sequence[EvalResult],
) -> dict[int, EvalResult]:
    """Evaluations by the step that they were taken after."""
    last = history[-1].step if history else 0
    points: dict[int, EvalResult] = {}
    for result, default in [(before, 0), *((e, 0) for e in evals), (after, last)]:
        if result is not None and result.mean is not None:
            points[result.step if result.step is not None else default] = result
    return points


def _draw_steps(axes: Any, history: Sequence[StepRecord]) -> None:
    drawn = [record for record in history if record.reward_mean is not None]
    axes.plot(
        [record.step for record in drawn],
        [record.reward_mean for record in drawn],
        color=_TRAIN,
        linewidth=1.6,
        marker="o",
        markersize=3,
        label="training batch, mean" if drawn else None,
    )


def _draw_evals(axes: Any, points: dict[int, EvalResult]) -> None:
    if not points:
        return
    steps = sorted(points)
    axes.errorbar(
        steps,
        [points[step].mean for step in steps],
        yerr=[points[step].ci95 or 0.0 for step in steps],
        color=_HELD_OUT,
        linewidth=1.6,
        marker="s",
        markersize=5,
        capsize=3,
        label=f"held out, mean ± 95 % CI (n={points[steps[-1]].n})",
    )


def summary_table(result: FitResult) -> Table:
    """A fit in a few rows."""
    table = Table(title=f"{result.policy}: {len(result.history)} steps", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, found in [
        ("held out before", result.before),
        ("held out after", result.after),
        ("best", result.best),
    ]:
        if found is not None:
            table.add_row(name, f"{found}  {found.version}")
    rewards = [r.reward_mean for r in result.history if r.reward_mean is not None]
    if rewards:
        table.add_row("training reward", f"{rewards[0]:.3f} first step, {rewards[-1]:.3f} last")
    dropped = ", ".join(f"{name} {count}" for name, count in sorted(result.dropped.items()))
    table.add_row("left out", dropped or "nothing")
    seconds = sum(record.seconds.get("total", 0.0) for record in result.history)
    spoken = sum(record.tokens.get("completion", 0) for record in result.history)
    table.add_row("time", f"{seconds:.1f} s in steps, {spoken} tokens sampled")
    table.add_row("use it as", f'ChatART(model="{result.adapter}")')
    return table
