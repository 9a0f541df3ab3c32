"""`langchain-art review report`: how far reviewers agree, and judges with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from langchain_art.client.sync_client import ArtClient, found_or_none
from langchain_art.evaluators.calibration import Agreement, agreement
from langchain_art.export.ids import HUMAN_REWARD
from langchain_art.statistics.agreement import JUDGE, Verdicts, verdicts
from langchain_art.wire import Trajectory

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
