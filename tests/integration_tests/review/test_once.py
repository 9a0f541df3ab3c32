"""A verdict is trained once, with its last value; a held-out one and one taken back never."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from langchain_art.client.sync_client import ArtClient
from langchain_art.review.pull import pull
from langchain_art.review.scores import Reading
from tests.support.exported_runs import export
from tests.support.langfuse_server import LangfuseServer
from tests.support.reviewed_runs import Command, MakeRuns, human_reward


def test_a_review_that_is_deleted_in_langfuse_is_not_trained(
    client: ArtClient,
    own_policy: str,
    make_runs: MakeRuns,
    review: Command,
    langfuse: LangfuseServer,
    tmp_path: Path,
) -> None:
    runs = make_runs(4)
    where = export(langfuse, runs)
    scores = [
        langfuse.annotate(where[run.id][0], "human_reward", float(i % 2))
        for i, run in enumerate(runs)
    ]
    assert pull(client, root=tmp_path).kept.new == 4
    delete(langfuse, scores[:2])
    pull(client, root=tmp_path, everything=True)
    told = review("train", own_policy)
    assert "2 runs and 0 single calls of 1 scenarios are trained on" in told
    assert "2 rewards: were taken back" in told

    # Deleted after it was trained: said, with the version that saw it; nothing is trained again.
    delete(langfuse, scores[2:3])
    told = review("pull", "--root", str(tmp_path), "--all")
    assert "taken back: 1 whose score Langfuse has no more" in told
    assert f"taken back after it was trained, by {own_policy}@1: {scores[2]}" in told
    assert f"3 rewards: were taken back ({own_policy}@1)" in review("train", own_policy)
    assert client.policy(own_policy).version == 1
    assert "taken back" not in review("pull", "--root", str(tmp_path), "--all")


def test_only_what_was_deleted_is_taken_back(
    client: ArtClient, make_runs: MakeRuns, langfuse: LangfuseServer, tmp_path: Path
) -> None:
    runs = make_runs(4)
    where = export(langfuse, runs)
    trace, [call] = where[runs[0].id]
    correction: Any = {"observation_id": call, "data_type": "CORRECTION"}
    corrected = langfuse.annotate(trace, "output", "In May.", **correction)
    given = langfuse.annotate(where[runs[1].id][0], "human_reward", "good", data_type="CATEGORICAL")
    lost = langfuse.annotate(where[runs[2].id][0], "human_reward", 1.0)
    sent = {"id": "sent-1", "name": "user_feedback", "value": 1, "dataType": "NUMERIC"}
    body = sent | {"traceId": where[runs[3].id][0]}
    sending = httpx.post(f"{langfuse.url}/api/public/scores", auth=langfuse.keys, json=[body])
    assert sending.is_success, sending.text
    assert pull(client, Reading(values={"good": 1.0}), root=tmp_path).kept.new == 3
    feedback = pull(client, Reading("user_feedback", "API"), root=tmp_path)
    assert (feedback.read, feedback.kept.new) == (1, 1)
    assert feedback.since is None  # what people gave is noted apart
    assert client.reviews(run=runs[3])[0].value == 1.0
    # Another project's: its trace is not in this one.
    [other] = make_runs(1)
    client.put_reviews([human_reward(other, 1.0, source="langfuse", id="elsewhere")])

    # A label without a value today, another source, another project: none of it was deleted.
    found = pull(client, root=tmp_path, everything=True)
    assert (found.gone, found.left_out) == ((), {"unmapped": 1})
    assert pull(client, Reading("user_feedback", "API"), root=tmp_path, everything=True).gone == ()

    # Another label since, which has no value: what was said before does not hold any more.
    labels = Reading(values={"good": 1.0})
    for label, holds in (("awful", False), ("good", True)):
        about: Any = {"data_type": "CATEGORICAL", "score_id": given}
        langfuse.annotate(where[runs[1].id][0], "human_reward", label, **about)
        for revised in (1, 0):
            assert pull(client, labels, root=tmp_path).kept.revised == revised
        assert client.reviews(run=runs[1])[0].taken_back is not holds

    langfuse.annotate(trace, "output", "", score_id=corrected, **correction)  # emptied
    langfuse.spans = [one for one in langfuse.spans if one.trace_id != where[runs[2].id][0]]
    delete(langfuse, [given, lost])  # the trace of the latter is gone, too: retention, maybe
    found = pull(client, root=tmp_path, everything=True)
    assert set(found.gone) == {corrected, given}
    [kept] = client.reviews(run=runs[0])
    assert kept.taken_back and kept.deleted and kept.kind == "correction"
    assert not client.reviews(run=runs[2])[0].taken_back
    langfuse.annotate(trace, "output", "In June.", score_id=corrected, **correction)
    assert pull(client, root=tmp_path).kept.revised == 1
    assert not client.reviews(run=runs[0])[0].taken_back


def delete(langfuse: LangfuseServer, scores: Sequence[str]) -> None:
    for one in scores:
        url = f"{langfuse.url}/api/public/scores/{one}"
        httpx.delete(url, auth=langfuse.keys).raise_for_status()
