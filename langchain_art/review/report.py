"""Agreement of reviewers, and of judges with them; a judge's scores in place of people's."""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from langchain_art.client.sync_client import ArtClient, found_or_none
from langchain_art.errors import ConfigError
from langchain_art.evaluators.calibration import Agreement, agreement
from langchain_art.export.ids import HUMAN_REWARD
from langchain_art.review.queue import AMONG, has_calls_of
from langchain_art.statistics.agreement import JUDGE, Verdicts, verdicts
from langchain_art.statistics.intervals import quantile, wilson
from langchain_art.wire import Review, Trajectory

#: What a run's own reward is called among its scores.
OWN_REWARD = "reward"


@dataclass(frozen=True)
class ReviewReport:
    """Reviews of a policy's runs, and how far its judges can be trusted."""

    reviews: int
    corrections: int
    verdicts: Verdicts
    judges: Mapping[str, Agreement]
    """Agreement with people, by the name of a run's score."""
    across: bool = False
    """No scenario has two reviewed runs, so runs of different scenarios were compared: right for
    a judge whose scores are absolute, not for one that ranks siblings (RULER)."""
    not_compared: Sequence[str] = field(default_factory=tuple[str, ...])
    """Scores that fewer than two reviewed runs have."""


def review_report(
    client: ArtClient,
    policy: str | None = None,
    *,
    name: str = HUMAN_REWARD,
    min_agreement: float = 0.0,
) -> ReviewReport:
    """Compare reviewers with each other, and the scores of runs with the reviewers' verdicts.

    Args:
        client: of the server that has the reviews.
        policy: only of runs with a call of this policy.
        name: of the score that people gave.
        min_agreement: see `verdicts`; runs on which reviewers abstain are not compared.
    """
    reviews = [one for one in client.reviews(policy=policy) if one.source != JUDGE]
    said = verdicts(reviews, name, min_agreement=min_agreement)
    human = {one.trajectory: one.value for one in said.used if one.call_id is None}
    # A run whose calls are tagged with its id, and which has no reward yet, is not stored.
    known = (found_or_none(client.trajectory, id_) for id_ in human)
    runs = [run for run in known if run is not None]
    judges, across, missing = judge_agreement(runs, human, but=name)
    corrections = sum(one.correction is not None for one in reviews)
    return ReviewReport(len(reviews), corrections, said, judges, across, missing)


def judge_agreement(
    runs: Sequence[Trajectory], human: Mapping[str, float], *, but: str = HUMAN_REWARD
) -> tuple[dict[str, Agreement], bool, list[str]]:
    """Agreement of each score of runs with people's verdicts (by run's id), within scenarios.

    The score `but` is people's own, and is not compared with them. Also gives whether runs of
    different scenarios were compared, and the scores that could not be compared.
    """
    scenarios: dict[str, list[Trajectory]] = {}
    for run in runs:
        scenarios.setdefault(run.scenario or f"\0{run.id}", []).append(run)
    across = all(len(some) < 2 for some in scenarios.values())
    groups = [list(runs)] if across else list(scenarios.values())
    found: dict[str, Agreement] = {}
    missing: list[str] = []
    for name in sorted({name for run in runs for name in scores_of(run)} - {but}):
        pairs = [
            [(scores_of(run)[name], human[run.id]) for run in some if name in scores_of(run)]
            for some in groups
        ]
        if any(len(some) > 1 for some in pairs):
            found[name] = agreement(pairs)
        else:
            missing.append(name)
    return found, across and bool(found), missing


def trust(found: Agreement) -> str:
    """Trust in a judge, in words, by the interval of Kendall's tau-b."""
    tau = found.kendall
    if tau.value is None or tau.low is None or tau.high is None:
        return "cannot be told: it, or people, gave all runs the same score"
    if tau.low > 0:
        return "ranks runs as people do, beyond chance"
    if tau.high < 0:
        return "ranks runs the other way round than people: do not train on it"
    return (
        "not shown to agree with people: let them review more runs (`langchain-art review push "
        "--pick disagreement`) before you train on it"
    )


def scores_of(run: Trajectory) -> dict[str, float]:
    """The scores of a run by name, and its own reward as `OWN_REWARD`."""
    own = {} if run.total_return is None else {OWN_REWARD: run.total_return}
    return {**own, **run.scores}


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

    Raises ConfigError if none of the newest runs has the score.

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
