"""Runs go into an annotation queue once, people review them there, and the report says how."""

import uuid
from pathlib import Path

import pytest

from langchain_art.cli.main import app
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.review.pull import pull
from langchain_art.review.queue import queue_runs
from langchain_art.wire import Review
from tests.support.exported_runs import export
from tests.support.langfuse_server import LangfuseServer
from tests.support.live_server import LiveServer
from tests.support.reviewed_runs import MakeRuns


def test_a_queue_is_filled_reviewed_and_reported(
    langfuse: LangfuseServer,
    art_server: LiveServer,
    make_runs: MakeRuns,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(art_server, "policy", f"reviewed-{uuid.uuid4().hex[:8]}")
    with ArtClient(art_server.base_url) as client:
        client.create_policy(art_server.policy)
    runs = make_runs(5)
    export(langfuse, runs[:4])
    with ArtClient(art_server.base_url) as client:
        for reward, run in enumerate(runs):
            client.reward(run, reward / 4)
        first = queue_runs(client, "lowest", 2)
        assert first.queued == (runs[0].id, runs[1].id)
        [config] = langfuse.configs.values()
        [queue] = langfuse.queues.values()
        assert (config["name"], config["minValue"], config["maxValue"]) == ("human_reward", 0, 1)
        assert queue["scoreConfigIds"] == [config["id"]]
        for item in list(langfuse.items.values()):
            value = 0.0 if item["objectId"] == trace(runs[0].id) else 1.0
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

    ask = ["report", art_server.policy, "--base-url", art_server.base_url]
    app(["review", *ask], standalone_mode=False)
    told = " ".join(capsys.readouterr().out.split())
    assert "2 reviews: 2 runs and calls have the score 'human_reward'" in told
    assert "ruler" in told and "reward: ranks runs as people do, beyond chance" in told
    push = ["push", "--pick", "random", "--n", "1", "--base-url", art_server.base_url]
    app(["review", *push], standalone_mode=False)
    assert "0 runs are queued in 'langchain-art', by random" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="expected one of them: --pick"):
        app(["review", "push"], standalone_mode=False)


def test_what_reviewers_disagree_on_goes_to_a_third_and_what_was_taken_back_is_open(
    langfuse: LangfuseServer, art_server: LiveServer, make_runs: MakeRuns, tmp_path: Path
) -> None:
    policy = f"disputed-{uuid.uuid4().hex[:8]}"
    with ArtClient(art_server.base_url) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(art_server, "policy", policy)
        client.create_policy(policy)
        runs = make_runs(5)
        export(langfuse, runs)
        agreed, disputed, single, back, fresh = runs

        def queued(queue: str) -> tuple[str, ...]:
            return queue_runs(client, "random", policy=policy, queue=queue).queued

        assert set(queued("ann's")) == set(queued("bob's")) == {run.id for run in runs}
        said = [("ann", agreed, 1.0), ("bob", agreed, 1.0), ("ann", disputed, 1.0)]
        said += [("bob", disputed, 0.0), ("ann", single, 0.0)]
        for who, run, value in said:
            langfuse.annotate(trace(run.id), "human_reward", value, author=who)
        taken = Review(
            id="r",
            source="page",
            trajectory=back.id,
            kind="reward",
            name="human_reward",
            reviewer="ann",
            at=1.0,
        )
        assert client.put_reviews([taken]).new == 1
        pull(client, root=tmp_path)
        third = queued("third")
        assert third[0] == disputed.id and set(third[1:]) == {back.id, fresh.id}


def trace(run: str) -> str:
    from langfuse import Langfuse

    return Langfuse.create_trace_id(seed=run)
