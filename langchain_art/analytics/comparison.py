"""Two versions compared, on the scenarios that both have runs of."""

from __future__ import annotations

from collections.abc import Iterable

from langchain_art.analytics.analysis import by_scenario, version_of
from langchain_art.errors import ConfigError
from langchain_art.statistics.intervals import Comparison, Rewards, compare_rewards
from langchain_art.wire import Trajectory


def compare(runs: Iterable[Trajectory], before: str, after: str) -> Comparison:
    """Test if the runs of version `after` have higher rewards than those of `before`.

    By `statistics.comparison.compare_rewards`: in pairs, where both have runs of same scenarios.

    Args:
        runs: of both versions, and of others, which are not looked at.
        before: as in `VersionFigures.version`: ``email-agent@0``.
        after: likewise.

    Raises:
        ConfigError: there is no scored run of one of them.
    """
    found = list(runs)
    rewards: list[Rewards] = []
    for version in (before, after):
        rewards.append(by_scenario(run for run in found if version_of(run) == version))
        if not rewards[-1]:
            known = sorted({version_of(run) for run in found})
            raise ConfigError(
                f"got the version {version!r}, expected one with scored runs among the "
                f"{len(found)} that were read; their versions: {', '.join(known) or 'none'}"
            )
    return compare_rewards(before, after, *rewards)
