"""Order of a fit's scenarios: shuffled epochs, and difficulty pools.

A scenario whose runs all fare alike, because it is always solved or never, has nothing to teach.
With difficulty pools it is passed over at its turn: after n such groups in a row it is drawn with
the probability 2^-n, and never below `FLOOR`, since the policy changes and no scenario is to be
forgotten. One group with variance puts it back to 1.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_art.rollout.scenarios import draw
from langchain_art.training.results.records import GroupResult
from langchain_art.wire.identifiers import scenario_id

#: The least share of its turns at which a scenario is drawn.
FLOOR = 0.1
POOLS = ("new", "mixed", "easy", "hard")


class DifficultyPools:
    """Results of the latest groups of each scenario.

    Args:
        scenarios: of the fit.
        seed: of the choice to pass over.
    """

    def __init__(self, scenarios: Sequence[Any], seed: int) -> None:
        self._names = [scenario_id(one) for one in scenarios]
        self._seed = seed
        self._flat: Counter[str] = Counter()
        self._rewards: dict[str, float] = {}

    def add(self, results: Iterable[GroupResult]) -> None:
        """Groups of a step, oldest first."""
        for one in results:
            self._flat[one.scenario] = self._flat[one.scenario] + 1 if one.flat else 0
            self._rewards[one.scenario] = one.reward

    def share(self, name: str) -> float:
        """Probability that a scenario is drawn when its turn comes: `FLOOR` to 1."""
        return max(FLOOR, 0.5 ** self._flat[name])

    def takes(self, place: int, name: str) -> bool:
        """True if a scenario is drawn at a place of the epochs; the same at each call."""
        share = self.share(name)
        return share == 1 or random.Random(f"{self._seed}:pool:{place}").random() < share

    def counts(self) -> dict[str, int]:
        """Scenarios by pool: ``mixed`` ones had variance; ``easy`` and ``hard`` ones had none.

        An easy one's reward is at least the mean of all scenarios' latest ones, a hard one's below.
        """
        known = self._rewards
        middle = statistics.fmean(known.values()) if known else 0.0
        found = Counter(self._pool(name, middle) for name in dict.fromkeys(self._names))
        return {name: found[name] for name in POOLS}

    def _pool(self, name: str, middle: float) -> str:
        if name not in self._rewards:
            return "new"
        if not self._flat[name]:
            return "mixed"
        return "easy" if self._rewards[name] >= middle else "hard"


class Drawing:
    """The scenarios of the groups to come, in order, from a place of the shuffled epochs on.

    Args:
        scenarios: of the fit.
        seed: of the order.
        begun: the place, from 0, of the first group.
        pools: None: every place is drawn.
    """

    def __init__(
        self, scenarios: Sequence[Any], seed: int, begun: int, pools: DifficultyPools | None
    ) -> None:
        self._scenarios = scenarios
        self._seed = seed
        self._begun = begun
        self._pools = pools
        self._places: list[int] = []

    def place(self, n: int) -> int:
        """The place of the n-th group, from 0, which is decided when it is first asked for."""
        while len(self._places) <= n:
            place = self.after(len(self._places))
            while not self._takes(place):
                place += 1
            self._places.append(place)
        return self._places[n]

    def scenario(self, n: int) -> Any:
        """The scenario of the n-th group. Raises ConfigError if there are no scenarios."""
        return draw(self._scenarios, self.place(n), self._seed)

    def after(self, groups: int) -> int:
        """The place that follows the first so many groups."""
        return self.place(groups - 1) + 1 if groups else self._begun

    def _takes(self, place: int) -> bool:
        if self._pools is None:
            return True
        return self._pools.takes(place, scenario_id(draw(self._scenarios, place, self._seed)))
