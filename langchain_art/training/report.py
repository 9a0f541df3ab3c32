"""Reports of steps and fits: tables, and rewards by step as an image or as text."""

from __future__ import annotations

import io
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from langchain_art.errors import ConfigError
from langchain_art.training.collapse import names_of
from langchain_art.training.records import EvalResult, FitResult, StepRecord
from langchain_art.wire import NodeReport, TrainResult
from langchain_art.wire.training import meaning


def summary_view(result: FitResult) -> Group:
    """A fit in a few rows, and what was trained by node."""
    parts = [summary_table(result)]
    if result.nodes:
        rewards = node_rewards(result.history)
        parts.append(node_table(result.nodes, "Trained by node, all steps", rewards))
    return Group(*parts)


def summary_table(result: FitResult) -> Table:
    """A fit in a few rows."""
    steps = f"{len(result.history)} step{'' if len(result.history) == 1 else 's'}"
    title = f"{' and '.join(result.versions)}: {steps}"
    table = Table(Column(style="bold"), Column(overflow="fold"), title=title, show_header=False)
    evals = {"held out before": result.before, "held out after": result.after, "best": result.best}
    for name, found in evals.items():
        if found is not None:
            table.add_row(name, f"{found}  {found.version}")
            if found.best_of:
                table.add_row("", best_of_runs(found))
    rewards = [r.reward_mean for r in result.history if r.reward_mean is not None]
    if rewards:
        table.add_row("training reward", f"{rewards[0]:.3f} first step, {rewards[-1]:.3f} last")
    for one in result.rollbacks:
        back = names_of(one.versions)
        table.add_row("rolled back", f"after step {one.step}, to {back}: {one.why}")
    if result.stopped:
        table.add_row("ended early", result.stopped)
    if own := sum(record.own_advantages for record in result.history):
        table.add_row("advantages", f"of {own} steps given by Trainer(advantages=…)")
    table.add_row("excluded", excluded_counts(result) or "nothing")
    if resampled := sum(record.resampled for record in result.history):
        groups = sum(record.groups for record in result.history)
        table.add_row(
            "resampled", f"{resampled} of {groups} groups, in place of zero-variance ones"
        )
    in_steps = sum(record.seconds.get("total", 0.0) for record in result.history)
    table.add_row("time", f"{duration(in_steps)} in steps, {duration(result.seconds)} in all")
    prompts, sampled = (result.tokens.get(name, 0) for name in ("prompt", "completion"))
    learned = sum(report.tokens for report in result.nodes.values())
    table.add_row("tokens", f"{prompts} read, {sampled} sampled, {learned} trained")
    if result.judge_cost is not None:
        table.add_row("judge", f"${result.judge_cost:.4f}")
    best = result.best.versions if result.best else ()
    chosen = {name.partition("@")[0]: name for name in best}
    for policy, version in result.versions.items():
        newest = f"{policy}@{version}"
        name = chosen.get(policy, newest)
        beside = "" if name == newest else f'  the best; the newest is "{newest}"'
        if not learned:
            beside = "  as it was: NOTHING was trained"
        table.add_row("use it as", f'ChatART(model="{name}"){beside}')
    return table


def node_table(
    nodes: Mapping[str, NodeReport], title: str, rewards: Mapping[str, str] | None = None
) -> Table:
    """Table of nodes: their calls' rewards if any has one, what was trained, and excluded calls."""
    node, excluded = Column("node", overflow="fold"), Column("calls excluded", overflow="fold")
    names = [*(["reward"] if rewards else []), "calls", "tokens", "mean |A|", "mean A"]
    numbers = [Column(name, justify="right") for name in names]
    table = Table(node, *numbers, excluded, title=title, title_justify="left")
    for name, report in nodes.items():
        mean = round(report.advantage_mean, 3) + 0.0  # never -0.000
        advantages = [f"{report.advantage_abs:.3f}", f"{mean:+.3f}"]
        table.add_row(
            escape(name),
            *([rewards.get(name, "-")] if rewards else []),
            str(report.calls),
            str(report.tokens),
            *(advantages if report.tokens else ["-", "-"]),
            escape(counts(report.excluded)) or "-",
        )
    return table


def node_rewards(history: Sequence[StepRecord]) -> dict[str, str]:
    """Mean reward by node, of its calls in the first step that has one, and in the last."""
    found: dict[str, list[float]] = {}
    for record in history:
        for name, reward in record.rewards_by_node.items():
            found.setdefault(name, []).append(reward)
    return {
        name: f"{rewards[0]:.3f}" if len(rewards) == 1 else f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
        for name, rewards in found.items()
    }


def best_of_runs(found: EvalResult) -> str:
    """``best of 1: 0.250, 2: 0.500``: the expected best reward of so many runs of a scenario."""
    known = (f"{k}: {reward:.3f}" for k, reward in found.best_of.items())
    return f"best of {', '.join(known)} (pass@k where rewards are 0 and 1)"


def eval_lines(found: EvalResult) -> list[str]:
    """An evaluation in a line, and below it the best of several runs and the nodes' rewards."""
    after = "" if found.step is None else f" after step {found.step}"
    lines = [f"held out{after}: {found}  {found.version}  {found.seconds:.1f}s"]
    if found.best_of:
        lines.append(f"  {best_of_runs(found)}")
    if by_node := found.node_rewards:
        worth = ", ".join(f"{node} {reward:.3f}" for node, reward in by_node.items())
        lines.append(f"  by node: {worth}")
    return lines


def eval_view(found: EvalResult) -> Text:
    """The lines of an evaluation."""
    return Text("\n".join(eval_lines(found)))


def duration(seconds: float) -> str:
    """``4.1s``, ``3m05s`` or ``2h07m``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def counts(found: Mapping[str, int]) -> str:
    """``reason 3, other 1``, the most frequent first."""
    return ", ".join(f"{reason} {count}" for reason, count in _most_frequent(found))


def _most_frequent(found: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))


def excluded_counts(found: StepRecord | FitResult) -> str:
    """Counts of what was excluded, by reason; calls that another policy trained are not counted."""
    strange = any("other_policy" in report.excluded for report in found.nodes.values())
    hidden = () if strange else ("/calls.other_policy",)
    return counts({k: n for k, n in found.excluded.items() if not k.endswith(hidden)})


def nothing_trained(record: StepRecord) -> list[str]:
    """A warning with reasons for each policy that a step trained on nothing; else empty.

    Example::

        step 1 trained email-agent on NOTHING; it stays at email-agent@0. Why:
          16 groups.zero_variance: all runs of a group have the same reward, so none is better
    """
    lines: list[str] = []
    for policy, result in record.results.items():
        if any(report.tokens for report in result.nodes.values()):
            continue
        name = f"{policy}@{result.version}"
        lines.append(f"step {record.step} trained {policy} on NOTHING; it stays at {name}. Why:")
        for reason, count in _most_frequent(result.excluded):
            lines.append(f"  {count} {reason}: {meaning(reason)}")
        if record.unjudged:
            lines.append(f"  {record.unjudged} groups.unjudged: {meaning('groups.unjudged')}")
    return lines


def overflowed(result: TrainResult) -> list[str]:
    """A warning if gradients of a step overflowed float16; else empty."""
    count = result.metrics.get("overflows")
    if not count:
        return []
    return [
        f"  {result.policy}: {count:.0f} updates overflowed float16 and were skipped, then made "
        f"again with a smaller loss scale, now {result.metrics['loss_scale']:g}"
    ]


def all_alike(rewards: Collection[float], runs: int) -> str | None:
    """A warning before the first step, if all of at least 8 `runs` are worth the same; else None.

    `rewards`: of these runs, or the means of their scenarios.
    """
    if runs < 8 or len(set(rewards)) != 1:
        return None
    match next(iter(rewards)):
        case 0:
            return (
                f"No run of {runs} was rewarded: warm-start the policy, shape the reward (a part "
                "of the way is worth a part), or take a larger base."
            )
        case 1:
            return (
                f"Every run of {runs} has the full reward: take harder scenarios or a stricter "
                "reward."
            )
        case reward:
            return (
                f"All {runs} runs have the reward {reward:.3g}: shape the reward, so that it tells "
                "better runs from worse ones."
            )


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


def figure_of(curves: Sequence[Curve], title: str) -> Any:
    """The curves in one figure of matplotlib; raises ConfigError if that is not installed."""
    instead = " Without it, `langchain-art curve` draws in the terminal."
    figure = blank_figure(7.2, 4.0, "The reward plot", instead)
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
    return figure


def blank_figure(width: float, height: float, what: str, instead: str = "") -> Any:
    """A figure of matplotlib, in inches, which a notebook shows. Raises ConfigError without it.

    The error says that `what` needs it, and what there is `instead`.
    """
    try:
        figures: Any = import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            f"{what} needs matplotlib: pip install 'langchain-art[examples]'.{instead}"
        ) from error
    size: dict[str, Any] = {"figsize": (width, height), "dpi": 150, "layout": "tight"}
    figure = figures.Figure(**size, facecolor="white")
    figure._repr_png_ = partial(_png, figure)  # pyplot, which registers figures, is not loaded
    return figure


def _png(figure: Any) -> bytes:
    image = io.BytesIO()
    figure.savefig(image)
    return image.getvalue()


def saved(figure: Any, path: Path) -> Path:
    """The path of a figure that is written there, a PNG if its name has no ending.

    Its folder is made if it is missing. Raises ConfigError for an ending that matplotlib has not.
    """
    path = path if path.suffix else path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(
            f"got the image {str(path)!r}, expected a name with .png: {error}"
        ) from error
    return path


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
