"""Two versions compared by the rewards of their runs, on the scenarios that both have runs of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from langchain_art.statistics.intervals import EXACT, PairedTest, paired_test, unpaired_test

Rewards = Mapping[str, Sequence[float]]
"""Scenario -> the rewards of its runs."""


class Comparison(BaseModel):
    """Comparison of the rewards of two versions' runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    before: str
    after: str
    paired: bool
    """True if both have runs of at least two same scenarios, and only these are compared."""
    scenarios: int
    """Pairs; unpaired, scenarios of both."""
    left_out: int
    """Scenarios that only one of them has runs of, where it is paired."""
    difference: float
    """Mean reward after minus before, each scenario weighing the same."""
    ci95: float | None
    p_value: float
    test: str
    """Name of the test."""

    @property
    def significant(self) -> bool:
        """True if chance alone would give such a difference in less than 5 % of cases."""
        return self.p_value < 0.05

    def __str__(self) -> str:
        spread = "" if self.ci95 is None else f" ± {self.ci95:.3f}"
        verdict = "significant" if self.significant else "not significant"
        found = f"{self.difference:+.3f}{spread}, p = {self.p_value:.3g}, {verdict} at 5 %"
        return f"{self.before} → {self.after}: {found} ({self.scenarios} scenarios; {self.test})"


def compare_rewards(before: str, after: str, first: Rewards, second: Rewards) -> Comparison:
    """Test if the rewards of `after`, `second`, are higher than those of `before`, `first`.

    Where both have rewards of the same scenarios, at least two, the means of these are compared in
    pairs (`intervals.paired_test`); else the means of all of either (`intervals.unpaired_test`).

    Raises:
        ValueError: one of them has no reward.
    """
    means = [
        {name: statistics.fmean(given) for name, given in rewards.items() if given}
        for rewards in (first, second)
    ]
    old, new = means
    shared = sorted(old.keys() & new.keys())
    if len(shared) >= 2:
        tested = paired_test([new[name] - old[name] for name in shared])
        how = "exact" if len(shared) <= EXACT else "10,000 draws"
        words = f"paired sign-flip permutation test, {how}"
        return _comparison(before, after, tested, words, len(shared), old.keys() ^ new.keys())
    tested = unpaired_test(list(old.values()), list(new.values()))
    words = "unpaired permutation test, 10,000 draws"
    return _comparison(before, after, tested, words, len(old) + len(new), None)


def _comparison(
    before: str,
    after: str,
    tested: PairedTest,
    words: str,
    scenarios: int,
    alone: Iterable[str] | None,
) -> Comparison:
    return Comparison(
        before=before,
        after=after,
        paired=alone is not None,
        scenarios=scenarios,
        left_out=len(set(alone or ())),
        difference=tested.difference,
        ci95=tested.ci95,
        p_value=tested.p_value,
        test=words,
    )
