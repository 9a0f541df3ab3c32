"""Two versions compared, on the scenarios that both have runs of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from langchain_art.analytics.analysis import by_scenario, version_of
from langchain_art.analytics.figures import Comparison
from langchain_art.analytics.intervals import EXACT, PairedTest, paired_test, unpaired_test
from langchain_art.errors import ConfigError
from langchain_art.wire import Trajectory


def compare(runs: Iterable[Trajectory], before: str, after: str) -> Comparison:
    """Whether the runs of version `after` have higher rewards than those of `before`.

    Where both have runs of the same scenarios, at least two, the means of these are compared in
    pairs (`intervals.paired_test`); else the means of all of either (`intervals.unpaired_test`).

    Args:
        runs: of both versions, and of others, which are not looked at.
        before: as in `VersionFigures.version`: ``email-agent@0``.
        after: likewise.

    Raises:
        ConfigError: there is no scored run of one of them.
    """
    found = list(runs)
    means: list[Mapping[str, float]] = []
    for version in (before, after):
        rewards = by_scenario(run for run in found if version_of(run) == version)
        if not rewards:
            known = sorted({version_of(run) for run in found})
            raise ConfigError(
                f"got the version {version!r}, expected one with scored runs among the "
                f"{len(found)} that were read; their versions: {', '.join(known) or 'none'}"
            )
        means.append({name: statistics.fmean(given) for name, given in rewards.items()})
    first, second = means
    shared = sorted(first.keys() & second.keys())
    if len(shared) >= 2:
        tested = paired_test([second[name] - first[name] for name in shared])
        how = "exact" if len(shared) <= EXACT else "10,000 draws"
        words = f"paired sign-flip permutation test, {how}"
        return _comparison(before, after, tested, words, len(shared), first.keys() ^ second.keys())
    tested = unpaired_test(list(first.values()), list(second.values()))
    words = "unpaired permutation test, 10,000 draws"
    return _comparison(before, after, tested, words, len(first) + len(second), None)


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
