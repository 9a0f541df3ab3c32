"""A fit by its own files: held-out evaluations, tokens, time and cost, without a server."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from langchain_art.analytics.report import plain_table
from langchain_art.errors import ConfigError
from langchain_art.statistics.intervals import Comparison
from langchain_art.training.fits import Fit
from langchain_art.training.records import EvalResult, FitResult, Record, compared
from langchain_art.training.report import counts, duration
from langchain_art.wire import NodeReport


class FitFigures(Record):
    """Figures of one fit, from its ``history.jsonl``."""

    name: str
    evals: tuple[EvalResult, ...]
    steps: int
    reward_first: float | None
    reward_last: float | None
    """Mean of the first and the last step's batch."""
    tokens: dict[str, int]
    """``prompt``, ``completion`` and ``trained``, of all steps and evaluations."""
    seconds: float
    excluded: dict[str, int]
    nodes: dict[str, NodeReport]
    gpu_usd: float | None
    """`seconds` at the rate that was given."""
    judge_usd: float | None


def analyze_fit(fit: Fit, gpu_rate: float | None = None) -> FitFigures:
    """The figures of a fit.

    Args:
        fit: as `read_fits` finds it.
        gpu_rate: US dollars an hour of the server. None: its cost is not counted.
    """
    whole = FitResult(
        fit_id=fit.state.fit_id,
        versions=fit.steps[-1].versions if fit.steps else {},
        history=tuple(fit.steps),
        evals=tuple(fit.evals),
    )
    rewards = [one.reward_mean for one in fit.steps if one.reward_mean is not None]
    return FitFigures(
        name=fit.name,
        evals=tuple(sorted(fit.evals, key=lambda one: one.step or 0)),
        steps=len(fit.steps),
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        tokens=whole.tokens,
        seconds=whole.seconds,
        excluded=whole.excluded,
        nodes=whole.nodes,
        gpu_usd=None if gpu_rate is None else whole.seconds / 3600 * gpu_rate,
        judge_usd=whole.judge_cost,
    )


def stored_fit_view(fit: Fit) -> Group:
    """The figures of a fit as a notebook shows them."""
    return fit_view(analyze_fit(fit))


def compare_evals(evals: Sequence[EvalResult], before: str, after: str) -> Comparison:
    """Two evaluated versions by the mean rewards of their scenarios (`training.records.compared`).

    Raises:
        ConfigError: a version was not evaluated, or no scenario of it has a reward.
    """
    found = {one.version: one for one in evals if one.scenarios}
    for version in (before, after):
        if version not in found:
            raise ConfigError(
                f"got the version {version!r}, expected one that was evaluated on scenarios with "
                f"rewards: {', '.join(found) or 'there is none'}"
            )
    return compared(found[before], found[after])


def fit_view(found: FitFigures, comparisons: Sequence[Comparison] = ()) -> Group:
    """Evaluations as a table, and the rest in lines."""
    names = ("step", "reward", "runs", "failed", "tokens", "time")
    table = plain_table(f"{found.name}: held out", ["version"], names)
    for one in found.evals:
        spread = "" if one.ci95 is None else f" ± {one.ci95:.3f}"
        table.add_row(
            one.version,
            str(one.step),
            "-" if one.mean is None else f"{one.mean:.3f}{spread}",
            str(one.n),
            str(one.failed or "-"),
            f"{sum(one.tokens.values()):,}",
            duration(one.seconds),
        )
    lines = [f"{found.steps} steps, {duration(found.seconds)} with evaluations"]
    if found.reward_first is not None and found.reward_last is not None:
        lines.append(f"training reward {found.reward_first:.3f} → {found.reward_last:.3f}")
    lines.append("tokens: " + ", ".join(f"{n:,} {name}" for name, n in found.tokens.items()))
    if found.gpu_usd is not None:
        lines.append(f"server: ${found.gpu_usd:.4g}")
    if found.judge_usd is not None:
        lines.append(f"judge: ${found.judge_usd:.4g}")
    lines.append(f"excluded: {counts(found.excluded) or 'nothing'}")
    return Group(table, *(Text(line) for line in [*lines, *(f"{one}" for one in comparisons)]))
