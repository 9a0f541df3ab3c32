"""A fit by its own files: held-out evaluations, tokens, time and cost, without a server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from rich.console import Group
from rich.text import Text

from langchain_art.analytics.report import plain_table
from langchain_art.errors import ConfigError
from langchain_art.statistics.intervals import Z95, Comparison
from langchain_art.training.fits import Fit
from langchain_art.training.records import EvalResult, FitResult, Record
from langchain_art.training.report import counts, duration
from langchain_art.wire import NodeReport


class FitFigures(Record):
    """Figures of one fit, from its ``history.jsonl``."""

    name: str
    evals: tuple[EvalResult, ...]
    """Evaluations in the order of their steps."""
    steps: int
    reward_first: float | None
    reward_last: float | None
    """Mean of the first and the last step's batch."""
    tokens: dict[str, int]
    """``prompt``, ``completion`` and ``trained``, of all steps and evaluations."""
    seconds: float
    """Seconds of all steps and evaluations."""
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


def compare_evals(evals: Sequence[EvalResult], before: str, after: str) -> Comparison:
    """Two evaluated versions by their means and intervals: the z test of two independent means.

    Two versions' runs of the same scenarios vary together, so it errs on the side of caution; the
    runs themselves are compared in pairs by `compare`.

    Raises:
        ConfigError: a version was not evaluated, or has no interval.
    """
    found = {one.version: one for one in evals if one.mean is not None and one.ci95 is not None}
    for version in (before, after):
        if version not in found:
            raise ConfigError(
                f"got the version {version!r}, expected one that was evaluated on at least two "
                f"scenarios: {', '.join(found) or 'there is none'}"
            )
    first, second = found[before], found[after]
    difference = (second.mean or 0.0) - (first.mean or 0.0)
    spread = math.hypot(first.ci95 or 0.0, second.ci95 or 0.0)
    if spread:
        p_value = 2 * (1 - NormalDist().cdf(abs(difference) / spread * Z95))
    else:
        p_value = 0.0 if difference else 1.0
    return Comparison(
        before=before,
        after=after,
        paired=False,
        scenarios=first.n + second.n,
        left_out=0,
        difference=difference,
        ci95=spread,
        p_value=p_value,
        test="z test of two independent means",
    )


def fit_view(found: FitFigures, compared: Sequence[Comparison] = ()) -> Group:
    """Evaluations as a table, and the rest in lines."""
    table = plain_table(f"{found.name}: held out", ["version"])
    for name in ("step", "reward", "runs", "failed", "tokens", "time"):
        table.add_column(name, justify="right", no_wrap=True)
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
    return Group(table, *(Text(line) for line in [*lines, *(f"{one}" for one in compared)]))
