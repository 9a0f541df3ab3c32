"""What people say in Langfuse comes to the server: once, in its latest revision, nothing lost."""

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ArtError, ConfigError, ServerUnreachable
from langchain_art.review.pull import OVERLAP, pull
from langchain_art.traces.from_langfuse import read_langfuse
from langchain_art.wire import Trajectory
from tests.support.exported_runs import export
from tests.support.langfuse_server import LangfuseServer
from tests.support.live_server import LiveServer
from tests.support.reviewed_runs import Command, MakeRuns


def test_scores_come_back_as_rewards_and_corrections(
    langfuse: LangfuseServer,
    art_server: LiveServer,
    make_runs: MakeRuns,
    tmp_path: Path,
    review: Command,
    monkeypatch: pytest.MonkeyPatch,
    client: ArtClient,
) -> None:
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    first, second = make_runs(2)
    lost = Trajectory(id="of-another-server")
    where = export(langfuse, [first, second, lost])
    langfuse.spans += langfuse.spans[:2]  # sent again, and not merged yet
    (trace, [call]), (other, _) = where[first.id], where[second.id]
    reward = langfuse.annotate(trace, "human_reward", 1.0, author="ann", comment="good")
    langfuse.annotate(other, "human_reward", 0.0, author="bob")
    langfuse.annotate(trace, "output", "In May.", observation_id=call, data_type="CORRECTION")
    langfuse.annotate(trace, "human_reward", True, observation_id=call, data_type="BOOLEAN")
    langfuse.annotate(where[lost.id][0], "human_reward", 1.0)
    langfuse.annotate("0" * 32, "human_reward", 1.0)
    langfuse.annotate(trace, "verdict", "good", data_type="CATEGORICAL")
    langfuse.annotate(other, "human_reward", 1.0, author=None)  # prefilled by a program

    def said(*options: str) -> str:
        return review("pull", "--root", str(tmp_path), *options)

    def pulled(*options: str) -> dict[str, Any]:
        return json.loads(said("--json", *options))

    found = pulled()
    assert (found["read"], found["new"], found["since"]) == (8, 4, None)
    assert [one["reason"] for one in found["refused"]] == ["unknown_trajectory"]
    assert found["left_out"] == {"no_trace": 1, "unmapped": 1, "prefilled": 1}
    assert found["unmapped_labels"] == ["good"]
    kept = {(one.kind, one.call_id): one for one in client.reviews(run=first.id)}
    call_id = first.turns[0].call_id
    assert kept["reward", None].value == 1.0
    assert (kept["reward", None].reviewer, kept["reward", None].comment) == ("ann", "good")
    assert kept["reward", call_id].value == 1.0
    corrected = {"role": "assistant", "content": "In May."}
    assert kept["correction", call_id].correction == corrected
    [one] = client.reviews(run=second.id)
    assert (one.value, one.reviewer) == (0.0, "bob")

    langfuse.annotate(trace, "human_reward", 0.25, author="ann", score_id=reward)
    again = pulled("--value", "good=1")
    assert (again["revised"], again["unchanged"], again["new"]) == (1, 3, 1)
    assert again["since"] is not None
    values = {one.id: one.value for one in client.reviews(run=first.id)}
    assert values[reward] == 0.25

    words = said()
    assert "8 scores read of" in words
    assert "unmapped: its label has no value; give it one with --value LABEL=NUMBER (good)" in words
    assert "refused: 1 of runs that this server does not have" in words


def test_the_next_pull_reads_what_is_new_and_what_may_have_come_late(
    langfuse: LangfuseServer, make_runs: MakeRuns, tmp_path: Path, client: ArtClient
) -> None:
    runs = make_runs(3)
    where = export(langfuse, runs)
    now, days = time.time(), OVERLAP.total_seconds()
    traces = [where[run.id][0] for run in runs]
    old = langfuse.annotate(traces[0], "human_reward", 1.0, at=now - 3 * days)
    langfuse.annotate(traces[1], "human_reward", 1.0, at=now)
    assert pull(client, root=tmp_path).kept.new == 2
    late = langfuse.annotate(traces[2], "human_reward", 1.0, at=now - days / 2)
    langfuse.annotate(traces[0], "human_reward", 0.0, score_id=old)  # before the overlap
    found = pull(client, root=str(tmp_path))
    assert (found.read, found.kept.new, found.kept.unchanged) == (2, 1, 1)
    assert [one.id for one in client.reviews(run=runs[2])] == [late]

    # Which run a trace shows is said by its root: the other observations are read only where
    # the server does not have the run.
    asked = [one for one in langfuse.requests if one.path.endswith("/v2/observations")]
    assert asked and all("isRootObservation" in one.query["filter"][0] for one in asked)

    found = pull(client, root=tmp_path, everything=True)
    assert (found.read, found.kept.revised, found.since) == (3, 1, None)

    [note] = (tmp_path / "reviews").iterdir()
    note.write_text("{}")
    with pytest.raises(ConfigError, match="Delete it"):
        pull(client, root=tmp_path)


def test_what_is_a_persons_score_is_the_same_wherever_it_is_read(
    langfuse: LangfuseServer, make_runs: MakeRuns, tmp_path: Path, client: ArtClient
) -> None:
    saved, prefilled, corrected, sent, none = runs = make_runs(5)
    where = export(langfuse, runs)
    trace = {run.id: where[run.id][0] for run in runs}
    langfuse.annotate(trace[saved.id], "human_reward", 0.75)
    for run in (prefilled, corrected):
        langfuse.annotate(trace[run.id], "human_reward", 1.0, author=None, score_id=f"p-{run.id}")
    langfuse.annotate(trace[corrected.id], "human_reward", 0.0, score_id=f"p-{corrected.id}")
    score = {"name": "human_reward", "value": 1, "traceId": trace[sent.id]}
    httpx.post(f"{langfuse.url}/api/public/scores", auth=langfuse.keys, json=[score])
    expected = {saved.id: 0.75, prefilled.id: None, corrected.id: 0.0, sent.id: None, none.id: None}
    pull(client, root=tmp_path)
    said = {run.id: [one.value for one in client.reviews(run=run)] for run in runs}
    assert said == {run: [] if value is None else [value] for run, value in expected.items()}
    assert {trace.run: trace.score for trace in read_langfuse().traces} == expected


def test_a_langfuse_that_fails_is_named_and_nothing_is_noted(
    langfuse: LangfuseServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: ArtClient
) -> None:
    langfuse.annotate("t", "human_reward", 1.0)
    monkeypatch.setattr("langfuse.api.core.http_client._retry_timeout", lambda **_: 0.0)
    expected: list[tuple[Any, type[ArtError], str]] = [
        ("401", ConfigError, "refuses the keys"),
        ("500", ServerUnreachable, "answers 500 to read scores"),
        ("429", ServerUnreachable, "answers 429"),
        ("refused", ServerUnreachable, "gave no answer"),
    ]
    for fault, error, words in expected:
        langfuse.fault = fault
        with pytest.raises(error, match=words):
            pull(client, root=tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("LANGFUSE_SECRET_KEY")
    with pytest.raises(ConfigError, match="no LANGFUSE_SECRET_KEY"):
        pull(client, root=tmp_path)
    assert timedelta(days=1) < OVERLAP
