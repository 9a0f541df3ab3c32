"""A judge's scores become verdicts where people agree with it, and people are asked elsewhere."""

import httpx
import pytest

from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.review.report import calibrate_judge, review_report
from langchain_art.wire import Review, ReviewTraining, Trajectory
from tests.support.reviewed_runs import Command, MakeRuns, human_reward


def said(run: Trajectory, value: float | None, at: float = 1.0) -> Review:
    return human_reward(run, value, at, reviewer="ann")


def test_it_is_trained_where_people_agree_and_asked_where_not(
    own_policy: str,
    make_runs: MakeRuns,
    review: Command,
    client: ArtClient,
    http: httpx.Client,
) -> None:
    policy = own_policy
    runs = make_runs(12)  # ruler says 0, 0.1, ... 1.1
    for run in runs[:5]:  # of the lower half people think the same
        client.put_reviews([said(run, 0.0)])
    for number, run in enumerate(runs[6:10]):  # of the upper one half of them do
        client.put_reviews([said(run, number % 2)])
    with pytest.raises(ConfigError, match=r"expected one that runs have: \['ruler'\]"):
        calibrate_judge(client, "tone", policy)
    asked = ("calibrate", "ruler", "--policy", policy, "--bands", "2")
    told = review(*asked)
    assert "0.57 to 1.00" in told and "trained" in told and "3 runs" not in told
    assert "2 runs wait for people" in told
    assert {one.source for one in client.reviews(policy=policy)} == {"page"}

    told = review(*asked, "--keep")
    assert "1 scores of ruler count as verdicts, 0 were taken back" in told
    [kept] = [one for one in client.reviews(policy=policy) if one.source == "judge"]
    assert (kept.trajectory, kept.value, kept.reviewer) == (runs[5].id, 0.5, "ruler")
    queue = f"/page/review-queue?pick=random&policy={policy}"
    for name in ("", "&reviewer=bob"):
        listed = {one["id"] for one in http.get(queue + name).json()["runs"]}
        assert runs[5].id not in listed and {runs[10].id, runs[11].id} <= listed
    plan = client.plan_reviews(ReviewTraining(policy=policy))
    assert plan.rewards[runs[5].id] == 0.5 and len(plan.rewards) == 10
    # A judge is no person: it is not compared with itself, and gives way to one.
    assert len(review_report(client, policy).verdicts.all) == 9
    client.put_reviews([said(runs[5], 1.0)])
    plan = client.plan_reviews(ReviewTraining(policy=policy))
    assert plan.rewards[runs[5].id] == 1.0

    # Once people agree too little, what was kept is taken back.
    client.put_reviews([said(runs[5], None, at=2.0)])
    assert client.plan_reviews(ReviewTraining(policy=policy)).rewards[runs[5].id] == 0.5
    client.put_reviews([said(run, 1.0, at=3.0) for run in runs[:4]])
    found = calibrate_judge(client, "ruler", policy, count=2, keep=True)
    assert (found.kept, found.taken_back) == (0, 1)
    assert runs[5].id not in client.plan_reviews(ReviewTraining(policy=policy)).rewards
    again = calibrate_judge(client, "ruler", policy, count=2, keep=True)
    assert (again.kept, again.taken_back) == (0, 0)
