"""Runs go into an annotation queue once, people review them, and the report says how.

A judge's scores become verdicts where people agree with it, and people are asked elsewhere.
"""

from pathlib import Path

import httpx
import pytest

from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.export.ids import trace_id
from langchain_art.review.pull import pull
from langchain_art.review.queue import queue_runs
from langchain_art.review.report import calibrate_judge, review_report
from langchain_art.wire import Review, ReviewTraining, Trajectory
from tests.support.exported_runs import export
from tests.support.langfuse_server import LangfuseServer
from tests.support.reviewed_runs import Command, MakeRuns, human_reward


def test_a_queue_is_filled_reviewed_and_reported(
    langfuse: LangfuseServer,
    own_policy: str,
    make_runs: MakeRuns,
    tmp_path: Path,
    review: Command,
    client: ArtClient,
) -> None:
    runs = make_runs(5)
    export(langfuse, runs[:4])
    for reward, run in enumerate(runs):
        client.reward(run, reward / 4)
    first = queue_runs(client, "lowest", 2)
    assert first.queued == (runs[0].id, runs[1].id)
    [config] = langfuse.configs.values()
    [queue] = langfuse.queues.values()
    assert (config["name"], config["minValue"], config["maxValue"]) == ("human_reward", 0, 1)
    assert queue["scoreConfigIds"] == [config["id"]]
    for item in list(langfuse.items.values()):
        value = 0.0 if item["objectId"] == trace_id(runs[0].id) else 1.0
        langfuse.annotate(item["objectId"], "human_reward", value, queue=queue["id"])
    assert pull(client, root=tmp_path).kept.new == 2

    second = queue_runs(client, "lowest", 10)
    assert second.queued == (runs[2].id, runs[3].id)
    # The server may have reviewed runs of other tests.
    assert second.left_out["reviewed"] >= 2 and second.left_out["no_trace"] >= 1
    third = queue_runs(client, "lowest", 10)
    assert third.queued == () and third.left_out["queued"] == 2
    assert len(langfuse.items) == 4 and len(langfuse.queues) == len(langfuse.configs) == 1
    with pytest.raises(ConfigError, match="does not ask for this score"):
        queue_runs(client, "random", name="another")
    assert queue_runs(client, "random", policy="nobody").queued == ()

    told = " ".join(review("report", own_policy).split())
    assert "2 reviews: 2 runs and calls have the score 'human_reward'" in told
    assert "ruler" in told and "reward: ranks runs as people do, beyond chance" in told
    told = review("push", "--pick", "random", "--n", "1")
    assert "0 runs are queued in 'langchain-art', by random" in told
    with pytest.raises(ConfigError, match="expected one of them: --pick"):
        review("push")


def test_what_reviewers_disagree_on_goes_to_a_third_and_what_was_taken_back_is_open(
    langfuse: LangfuseServer,
    own_policy: str,
    make_runs: MakeRuns,
    tmp_path: Path,
    client: ArtClient,
) -> None:
    runs = make_runs(5)
    export(langfuse, runs)
    agreed, disputed, single, back, fresh = runs

    def queued(queue: str) -> tuple[str, ...]:
        return queue_runs(client, "random", policy=own_policy, queue=queue).queued

    assert set(queued("ann's")) == set(queued("bob's")) == {run.id for run in runs}
    for who, run, value in (
        ("ann", agreed, 1.0),
        ("bob", agreed, 1.0),
        ("ann", disputed, 1.0),
        ("bob", disputed, 0.0),
        ("ann", single, 0.0),
    ):
        langfuse.annotate(trace_id(run.id), "human_reward", value, author=who)
    assert client.put_reviews([human_reward(back, None, reviewer="ann")]).new == 1
    pull(client, root=tmp_path)
    third = queued("third")
    assert third[0] == disputed.id and set(third[1:]) == {back.id, fresh.id}


def test_it_is_trained_where_people_agree_and_asked_where_not(
    own_policy: str, make_runs: MakeRuns, review: Command, client: ArtClient, http: httpx.Client
) -> None:
    policy = own_policy

    def said(run: Trajectory, value: float | None, at: float = 1.0) -> Review:
        return human_reward(run, value, at, reviewer="ann")

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
