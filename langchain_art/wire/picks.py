"""Review sampling: four orders of the runs that were not reviewed yet."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from statistics import pstdev
from typing import Literal, Protocol, TypeVar

Pick = Literal["disagreement", "lowest", "random", "uncertain"]


class Rankable(Protocol):
    """Facts that a pick reads of a run: of a `Trajectory`, or of the server's summary of one."""

    @property
    def id(self) -> str:
        """Id of the run."""
        ...

    @property
    def scenario(self) -> str | None:
        """Key that its siblings share."""
        ...

    @property
    def scores(self) -> Mapping[str, float]:
        """Scores by name."""
        ...

    @property
    def total_return(self) -> float | None:
        """`Trajectory.total_return`."""
        ...


RunT = TypeVar("RunT", bound=Rankable)


def ranked(runs: Sequence[RunT], pick: Pick) -> list[RunT]:
    """The runs that a pick can order, those first that are to be reviewed first.

    ============  ==================================================================
    pick          first come
    ============  ==================================================================
    disagreement  runs whose scores (of judges and criteria) differ most. Each score is
                  compared by its rank among these runs; a run needs two of them
    lowest        runs with the lowest total return
    random        any, in an order by their ids: the same each time
    uncertain     runs of the scenario whose returns differ most (standard deviation);
                  it needs two runs with a return
    ============  ==================================================================

    Equal ones are in the order of `random`. A run that a pick cannot order is not in the result.
    """
    mixed = sorted(runs, key=lambda run: hashlib.sha256(run.id.encode()).digest())
    if pick == "random":
        return mixed
    if pick == "lowest":
        worth = {run.id: run.total_return for run in mixed}
        return _by(mixed, {id_: -value for id_, value in worth.items() if value is not None})
    return _by(mixed, _disagreement(mixed) if pick == "disagreement" else _uncertainty(mixed))


def _by(runs: Sequence[RunT], worth: dict[str, float]) -> list[RunT]:
    return sorted((run for run in runs if run.id in worth), key=lambda run: -worth[run.id])


def _disagreement(runs: Sequence[Rankable]) -> dict[str, float]:
    """The largest difference of two of a run's scores, each as its mean rank in [0, 1]."""
    names = {name for run in runs for name in run.scores}
    ordered = {
        name: sorted(run.scores[name] for run in runs if name in run.scores) for name in names
    }
    found: dict[str, float] = {}
    for run in runs:
        ranks = [_rank(value, ordered[name]) for name, value in run.scores.items()]
        if len(ranks) > 1:
            found[run.id] = max(ranks) - min(ranks)
    return found


def _rank(value: float, ordered: Sequence[float]) -> float:
    return (bisect_left(ordered, value) + bisect_right(ordered, value)) / (2 * len(ordered))


def _uncertainty(runs: Sequence[Rankable]) -> dict[str, float]:
    """The standard deviation of the returns of a run's scenario."""
    returns: dict[str, list[float]] = {}
    for run in runs:
        if run.scenario is not None and run.total_return is not None:
            returns.setdefault(run.scenario, []).append(run.total_return)
    spread = {name: pstdev(values) for name, values in returns.items() if len(values) > 1}
    return {
        run.id: spread[run.scenario]
        for run in runs
        if run.scenario in spread and run.total_return is not None
    }
