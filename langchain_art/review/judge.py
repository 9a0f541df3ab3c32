"""`langchain-art review calibrate`: a judge's scores in place of people's, where they agree."""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.export.ids import HUMAN_REWARD
from langchain_art.review.queue import AMONG, has_calls_of
from langchain_art.review.report import scores_of
from langchain_art.statistics.agreement import JUDGE, verdicts
from langchain_art.statistics.intervals import quantile, wilson
from langchain_art.wire import Review


@dataclass(frozen=True)
class Band:
    """The runs whose score by a judge is in a range, and how often people agree with it."""

    low: float
    high: float
    """The next band's `low`, which is not in this one; of the last band, the highest score."""
    reviewed: int
    agree: int
    """Reviewed runs that both, or neither, call good."""
    interval: tuple[float, float] | None
    """95 % of ``agree / reviewed``, by Wilson; None: nothing is reviewed."""
    trusted: bool
    """True if `interval` lies above the rate that was asked for."""
    open: Mapping[str, float]
    """Scores of runs that no person has reviewed, by the run's id."""


@dataclass(frozen=True)
class Calibrated:
    """A judge's bands, from the lowest scores to the highest, and what was kept of its scores."""

    bands: Sequence[Band]
    kept: int = 0
    taken_back: int = 0
    """Scores that did, in bands that are not trusted any more."""


def bands_of(
    judged: Mapping[str, float],
    human: Mapping[str, float | None],
    *,
    count: int = 4,
    good: float = 0.5,
    at_least: float = 0.5,
) -> list[Band]:
    """Bands of as many runs each, `count` at most, as far as equal scores allow.

    `judged` and `human` are by run's id, the latter None where people disagree. From `good` on a
    run is good, by the judge and by people; the interval of a trusted band lies above `at_least`.
    """
    ordered = sorted(judged.values())
    inner = (
        sorted({quantile(ordered, share / count) for share in range(1, count)}) if ordered else []
    )
    members: list[dict[str, float]] = [{} for _ in range(len(inner) + 1)]
    for run, score in judged.items():
        members[bisect_right(inner, score)][run] = score
    found: list[Band] = []
    for at, runs in enumerate(members):
        if not runs:
            continue
        both = [
            (score, said) for run, score in runs.items() if (said := human.get(run)) is not None
        ]
        agree = sum((score >= good) == (verdict >= good) for score, verdict in both)
        interval = wilson(agree, len(both)) if both else None
        found.append(
            Band(
                low=inner[at - 1] if at else ordered[0],
                high=inner[at] if at < len(inner) else ordered[-1],
                reviewed=len(both),
                agree=agree,
                interval=interval,
                trusted=interval is not None and interval[0] > at_least,
                open={run: score for run, score in runs.items() if run not in human},
            )
        )
    return found


def calibrate_judge(
    client: ArtClient,
    score: str,
    policy: str | None = None,
    *,
    name: str = HUMAN_REWARD,
    count: int = 4,
    good: float = 0.5,
    at_least: float = 0.5,
    keep: bool = False,
) -> Calibrated:
    """Compare a judge with people band by band, and keep its scores where it is trusted.

    Args:
        client: of the server that has the runs and the reviews.
        score: the judge's, among the scores of runs.
        policy: only runs with a call of this policy.
        name: the score that people give.
        count: see `bands_of`, as for the next two.
        good: see there.
        at_least: see there.
        keep: the scores of trusted bands count as verdicts on runs that no person has reviewed;
            what was kept before of other bands is taken back.

    Raises:
        ConfigError: none of the newest runs has the score.
    """
    runs = [one for one in client.trajectories(AMONG) if not policy or has_calls_of(one, policy)]
    judged = {run.id: found[score] for run in runs if score in (found := scores_of(run))}
    if not judged:
        names = sorted({known for run in runs for known in scores_of(run)})
        raise ConfigError(f"got the score {score!r}, expected one that runs have: {names}")
    reviews = client.reviews(policy=policy)
    people = [one for one in reviews if one.source != JUDGE]
    said = verdicts(people, name).all
    human = {
        one.trajectory: None if one.abstains else one.value for one in said if one.call_id is None
    }
    bands = bands_of(judged, human, count=count, good=good, at_least=at_least)
    if not keep:
        return Calibrated(bands)
    now = {run: value for band in bands if band.trusted for run, value in band.open.items()}
    mine = [one for one in reviews if (one.source, one.reviewer, one.name) == (JUDGE, score, name)]
    before = {one.trajectory: one.value for one in mine if not one.taken_back}
    changed = {run: value for run, value in now.items() if before.get(run) != value}
    gone = [run for run in before if run in judged and run not in now]
    at = time.time()

    def review(run: str, value: float | None) -> Review:
        digest = hashlib.sha256(f"{name}\0{score}\0{run}".encode()).hexdigest()[:32]
        about = {"id": f"judge-{digest}", "source": JUDGE, "trajectory": run, "kind": "reward"}
        return Review.model_validate(
            about | {"name": name, "value": value, "reviewer": score, "at": at}
        )

    client.put_reviews(
        [*(review(*one) for one in changed.items()), *(review(run, None) for run in gone)]
    )
    return Calibrated(bands, len(now), len(gone))
