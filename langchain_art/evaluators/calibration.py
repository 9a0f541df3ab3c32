"""Agreement of a judge with human scores: rank correlations with bootstrap confidence intervals.

A judge's scores are relative, so ranks are compared within each group, never across groups. With a
single group the results are the ordinary Spearman's rho and Kendall's tau-b.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from rich.table import Table

from langchain_art.errors import ConfigError
from langchain_art.evaluators.scoring import Evaluator, score_groups
from langchain_art.statistics.intervals import quantile
from langchain_art.wire import Trajectory, TrajectoryGroup

Pairs: TypeAlias = "Sequence[tuple[float, float]]"
"""The runs of one group: (the judge's score, a person's score)."""
Human: TypeAlias = "str | Mapping[str, float] | Callable[[Trajectory], float | None]"
"""Source of human scores: a name in `Trajectory.scores`, a mapping by a run's id, or a function."""


@dataclass(frozen=True)
class Correlation:
    """A rank correlation in [-1, 1] and its interval; None: undefined (zero variance)."""

    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.value is None:
            return "undefined"
        if self.low is None or self.high is None:
            return f"{self.value:+.3f}"
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class Agreement:
    """The rank correlations of a judge's scores with human scores."""

    kendall: Correlation
    spearman: Correlation
    runs: int
    """Runs with both scores, in groups with at least two such runs."""
    groups: int
    """Groups with at least two such runs."""
    excluded: int = 0
    """Runs with only one of the two scores, or the only run with both in their group."""
    unjudged: int = 0
    """Groups for which the judge raised."""


async def calibrate(
    evaluator: Evaluator, groups: Sequence[TrajectoryGroup], human: Human = "human"
) -> Agreement:
    """Score groups with a judge, and compare its scores with human scores of the same runs.

    Example::

        found = await calibrate(RulerEvaluator("openai/o3"), groups, human="human")
        print(found.kendall)     # +0.712 [+0.604, +0.801]

    Args:
        evaluator: a `GroupEvaluator`, or any function that a `Trainer` takes.
        groups: runs of one scenario each. The judge does not see their human scores.
        human: see `Human`; runs without such a score are excluded and counted.

    Raises:
        ArtError: the judge raised for every group.
        ConfigError: no group has two runs with both scores.
    """
    rated = {run.id: _human(run, human) for group in groups for run in group.trajectories}
    judged = await score_groups([_hidden(group) for group in groups], evaluator)
    both = ([(run.reward, rated[run.id]) for run in g.trajectories] for g in judged.groups)
    paired = [[(j, h) for j, h in g if j is not None and h is not None] for g in both]
    found = agreement(paired)
    return replace(found, excluded=len(rated) - found.runs, unjudged=judged.unjudged)


def agreement(
    groups: Sequence[Pairs], *, resamples: int = 1000, confidence: float = 0.95, seed: int = 0
) -> Agreement:
    """Rank correlations of two scores, within groups, with bootstrap intervals.

    Kendall's tau-b is ``(C - D) / sqrt(U_j * U_h)``: C concordant pairs of runs within a group, D
    discordant pairs, U_j and U_h pairs that the judge (the person) does not tie; each summed over
    the groups (Kendall, Biometrika 33, 1945, for the ties). Spearman's rho is Pearson's correlation
    of the ranks within each group (equal scores: their mean rank), its terms summed likewise.

    The interval is the percentile bootstrap (Efron, Annals of Statistics 7, 1979). Groups are drawn
    with replacement, since runs of one group depend on each other; of a single group, its runs.
    Draws without variance have no correlation and are skipped.

    Args:
        groups: (judge, human) pairs of each group; groups with fewer than two are excluded.
        resamples: draws of the bootstrap.
        confidence: share of the draws within the interval.
        seed: of the draws; the same arguments give the same interval.

    Raises:
        ConfigError: a score is not finite, an option makes no sense, or no group has two runs.
    """
    if resamples < 1 or not 0 < confidence < 1:
        raise ConfigError(
            f"got {resamples=}, {confidence=}, expected at least 1, and within (0, 1)"
        )
    usable = [list(group) for group in groups if len(group) >= 2]
    if any(not (math.isfinite(j) and math.isfinite(h)) for group in usable for j, h in group):
        raise ConfigError("got a score that is not finite; exclude runs that were not scored")
    if not usable:
        raise ConfigError(
            f"got {len(groups)} groups, none with two runs that both the judge and a person "
            "scored, so there is nothing to compare. Rate at least two runs of a scenario."
        )
    rng = random.Random(seed)
    sums = [_sums(group) for group in usable]
    if len(usable) > 1:
        draws = [_total(rng.choices(sums, k=len(sums))) for _ in range(resamples)]
    else:
        only = usable[0]
        draws = [_sums(rng.choices(only, k=len(only))) for _ in range(resamples)]
    whole, runs = _total(sums), sum(len(group) for group in usable)
    return Agreement(
        kendall=_correlation(whole.kendall, [draw.kendall for draw in draws], confidence),
        spearman=_correlation(whole.spearman, [draw.spearman for draw in draws], confidence),
        runs=runs,
        groups=len(usable),
        excluded=sum(len(group) for group in groups) - runs,
    )


def agreement_table(found: Mapping[str, Agreement], title: str = "Agreement with people") -> Table:
    """One line per judge, for ``rich.print``."""
    table = Table(title=title)
    for column in ("judge", "Kendall's tau-b", "Spearman's rho", "runs", "groups", "excluded"):
        table.add_column(column, justify="left" if column == "judge" else "right")
    for name, one in found.items():
        counts = (str(one.runs), str(one.groups), f"{one.excluded} runs, {one.unjudged} groups")
        table.add_row(name, str(one.kendall), str(one.spearman), *counts)
    return table


class _Sums(NamedTuple):
    """The terms of both correlations, which add up over groups; pairs are (judge, human)."""

    order: float  # concordant pairs less discordant pairs
    untied: float
    human_untied: float
    products: float
    squares: float
    human_squares: float

    @property
    def kendall(self) -> float | None:
        return _ratio(self.order, self.untied, self.human_untied)

    @property
    def spearman(self) -> float | None:
        return _ratio(self.products, self.squares, self.human_squares)


def _sums(pairs: Pairs) -> _Sums:
    judge, human = zip(*pairs, strict=True)
    middle = (len(pairs) + 1) / 2
    x, y = ([rank - middle for rank in _ranks(values)] for values in (judge, human))
    return _Sums(
        order=_order(pairs),
        untied=_untied(judge),
        human_untied=_untied(human),
        products=sum(a * b for a, b in zip(x, y, strict=True)),
        squares=sum(a**2 for a in x),
        human_squares=sum(b**2 for b in y),
    )


def _total(sums: Sequence[_Sums]) -> _Sums:
    return _Sums(*(sum(terms) for terms in zip(*sums, strict=True)))


def _ratio(over: float, left: float, right: float) -> float | None:
    if not left or not right:
        return None
    return max(-1.0, min(1.0, over / math.sqrt(left * right)))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share their mean rank."""
    ordered = sorted(values)
    return [
        (bisect_left(ordered, value) + 1 + bisect_right(ordered, value)) / 2 for value in values
    ]


def _untied(values: Sequence[float]) -> int:
    ordered = sorted(values)
    return sum(bisect_left(ordered, value) for value in ordered)


def _order(pairs: Pairs) -> int:
    """Concordant pairs less discordant pairs, in n log n."""
    found, seen = 0, list[float]()
    for _, tied in groupby(sorted(pairs), key=itemgetter(0)):
        humans = [human for _, human in tied]
        found += sum(bisect_left(seen, y) + bisect_right(seen, y) - len(seen) for y in humans)
        for y in humans:
            insort(seen, y)
    return found


def _correlation(
    value: float | None, draws: Sequence[float | None], confidence: float
) -> Correlation:
    defined = sorted(draw for draw in draws if draw is not None)
    if value is None or not defined:
        return Correlation(value, None, None)
    tail = (1 - confidence) / 2
    return Correlation(value, quantile(defined, tail), quantile(defined, 1 - tail))


def _human(run: Trajectory, human: Human) -> float | None:
    if isinstance(human, str):
        return run.scores.get(human)
    return human.get(run.id) if isinstance(human, Mapping) else human(run)


def _hidden(group: TrajectoryGroup) -> TrajectoryGroup:
    blank = {"reward": None, "scores": {}}
    runs = tuple(run.model_copy(update=blank) for run in group.trajectories)
    return group.model_copy(update={"trajectories": runs})
