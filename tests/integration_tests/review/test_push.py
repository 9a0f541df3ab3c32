"""Runs go into an annotation queue once, people review them there, and the report says how."""

from pathlib import Path

import pytest

from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.export.ids import trace_id
from langchain_art.review.pull import pull
from langchain_art.review.queue import queue_runs
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
    said = [("ann", agreed, 1.0), ("bob", agreed, 1.0), ("ann", disputed, 1.0)]
    said += [("bob", disputed, 0.0), ("ann", single, 0.0)]
    for who, run, value in said:
        langfuse.annotate(trace_id(run.id), "human_reward", value, author=who)
    assert client.put_reviews([human_reward(back, None, reviewer="ann")]).new == 1
    pull(client, root=tmp_path)
    third = queued("third")
    assert third[0] == disputed.id and set(third[1:]) == {back.id, fresh.id}
