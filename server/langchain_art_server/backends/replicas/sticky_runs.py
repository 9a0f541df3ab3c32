"""Which replica gets a call: that of its run, or else the least loaded one."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Mapping

#: A run leaves its replica for the least loaded one when that has `n` open calls and its own has
#: more than `SPREAD_FACTOR` · n + `SPREAD_CALLS`.
SPREAD_FACTOR, SPREAD_CALLS = 2, 8
#: Runs whose replica is remembered: those that had a call last.
MOST_RUNS = 1 << 16


class StickyRuns:
    """Remembers each run's replica, whose prefix cache holds the run's prompts.

    Replicas are numbers. A run that had to leave its replica stays with the new one.
    """

    def __init__(self, most_runs: int = MOST_RUNS) -> None:
        self._most_runs = most_runs
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._turns = itertools.count(1)
        self._last: Counter[int] = Counter()

    def choose(self, run: str, calls: Mapping[int, int]) -> int:
        """The replica for a call of `run` (``""``: of none).

        Args:
            run: the run's id.
            calls: the open calls of each replica that can answer; at least one.

        Returns:
            The run's replica, if it is among them and not far more loaded than the least loaded
            one; else the latter. Of equally loaded ones, that which was given a run longest ago.
        """
        home = self._homes.get(run) if run else None
        if home is None or home not in calls or calls[home] > _bound(min(calls.values())):
            home = min(calls, key=lambda one: (calls[one], self._last[one]))
            self._last[home] = next(self._turns)
        if run:
            self._homes[run] = home
            self._homes.move_to_end(run)
            if len(self._homes) > self._most_runs:
                self._homes.popitem(last=False)
        return home


def _bound(least: int) -> int:
    return SPREAD_FACTOR * least + SPREAD_CALLS
