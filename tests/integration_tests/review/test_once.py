"""A verdict is trained once, with its last value; a held-out one and one taken back never."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import httpx
import pytest

from langchain_art.cli.main import app
from langchain_art.client.sync_client import ArtClient
from langchain_art.review.pull import pull
from langchain_art.review.scores import Reading
from langchain_art.wire import Trajectory
from tests.support.exported_runs import export
from tests.support.langfuse_server import LangfuseServer
from tests.support.live_server import LiveServer
from tests.support.reviewed_runs import MakeRuns, human_reward


class Reviewed:
    """A policy, runs of it, and what `review train` says of them."""

    def __init__(
        self, server: LiveServer, client: ArtClient, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.server, self.client, self._capsys = server, client, capsys
        self.policy = server.policy
        client.create_policy(self.policy)

    def say(self, run: Trajectory, value: float | None, at: float = 1.0, **more: Any) -> None:
        self.client.put_reviews([human_reward(run, value, at, **more)])

    def train(self, *options: str) -> str:
        """What the command says; it ends with 1 where there is nothing to train."""
        ask = ["review", "train", self.policy, "--base-url", self.server.base_url, *options]
        try:
            app(ask, standalone_mode=False)
        except click.exceptions.Exit as stopped:
            assert stopped.exit_code == 1
        return self.said()

    def said(self) -> str:
        return self._capsys.readouterr().out

    @property
    def version(self) -> int:
        return self.client.policy(self.policy).version


@pytest.fixture
def reviewed(
    art_server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.setattr(art_server, "policy", f"once-{uuid.uuid4().hex[:8]}")
    with ArtClient(art_server.base_url) as client:
        yield Reviewed(art_server, client, capsys)


def test_a_review_that_is_deleted_in_langfuse_is_not_trained(
    reviewed: Reviewed, make_runs: MakeRuns, langfuse: LangfuseServer, tmp_path: Path
) -> None:
    runs = make_runs(4)
    where = export(langfuse, runs)
    scores = [
        langfuse.annotate(where[run.id][0], "human_reward", float(i % 2))
        for i, run in enumerate(runs)
    ]
    client = reviewed.client
    assert pull(client, root=tmp_path).kept.new == 4
    delete(langfuse, scores[:2])
    pull(client, root=tmp_path, everything=True)
    told = reviewed.train()
    assert "2 runs and 0 single calls of 1 scenarios are trained on" in told
    assert "2 rewards: were taken back" in told

    # Deleted after it was trained: said, with the version that saw it; nothing is trained again.
    delete(langfuse, scores[2:3])
    asked = ["review", "pull", "--root", str(tmp_path), "--base-url", reviewed.server.base_url]
    app([*asked, "--all"], standalone_mode=False)
    told = reviewed.said()
    assert "taken back: 1 whose score Langfuse has no more" in told
    assert f"taken back after it was trained, by {reviewed.policy}@1: {scores[2]}" in told
    assert f"3 rewards: were taken back ({reviewed.policy}@1)" in reviewed.train()
    assert reviewed.version == 1
    app([*asked, "--all"], standalone_mode=False)
    assert "taken back" not in reviewed.said()


def test_only_what_was_deleted_is_taken_back(
    reviewed: Reviewed, make_runs: MakeRuns, langfuse: LangfuseServer, tmp_path: Path
) -> None:
    runs = make_runs(4)
    where = export(langfuse, runs)
    client = reviewed.client
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
    assert pull(client, Reading("user_feedback", "API"), root=tmp_path).kept.new == 1
    # Another project's: its trace is not in this one.
    about: dict[str, Any] = {"source": "langfuse", "id": "elsewhere"}
    [other] = make_runs(1)
    reviewed.say(other, 1.0, **about)

    # A label without a value today, another source, another project: none of it was deleted.
    found = pull(client, root=tmp_path, everything=True)
    assert (found.gone, found.left_out) == ((), {"unmapped": 1})
    assert pull(client, Reading("user_feedback", "API"), root=tmp_path, everything=True).gone == ()

    # Another label since, which has no value: what was said before does not hold any more.
    labels = Reading(values={"good": 1.0})
    for label, holds in (("awful", False), ("good", True)):
        about = {"data_type": "CATEGORICAL", "score_id": given}
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
