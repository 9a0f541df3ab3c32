"""The pages with blocks that talk to LangSmith and Langfuse run as they stand."""

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from langchain_art import ArtClient
from langchain_art.export import ids
from tests.support.judges.hosted import Hosted
from tests.support.judges.ranking_judge import RankingJudge
from tests.support.langfuse_server import LangfuseServer
from tests.support.langsmith_settings import langsmith_settings
from tests.support.live_server import LiveServer
from tests.support.pages import REPO, run_page

PAGE = REPO / "docs" / "judging.md"
FROM_AN_EVALUATION = REPO / "docs" / "from-an-evaluation.md"


@pytest.fixture
def services(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    old, new = str(uuid.uuid4()), str(uuid.uuid4())
    runs = {old: [{"output": "15 May"}], new: [{"output": "14 March"}]}
    with (
        Hosted(runs, names={"agent-0": old, "agent-17": new}) as hosted,
        langsmith_settings(ENDPOINT=hosted.url, API_KEY="none", TRACING="false"),
    ):
        for name, value in {
            "LANGFUSE_BASE_URL": hosted.url,
            "LANGFUSE_PUBLIC_KEY": f"pk-{old}",
            "LANGFUSE_SECRET_KEY": "none",
        }.items():
            monkeypatch.setenv(name, value)
        yield


def test_every_block_runs_and_prints_what_it_says(
    services: None, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"judge": RankingJudge()}
    assert run_page(PAGE, names, lambda: capsys.readouterr().out) == 11
    assert names["compared"].comparative_experiment.name
    names["langfuse"].shutdown()
    for composite in ("gated", "careful", "jury"):
        rewards = [run.reward for run in names[composite].invoke(names["group"]).trajectories]
        assert rewards == pytest.approx([1.0, 0.4, 0.0]), composite


def test_an_evaluation_becomes_a_training_run(
    services: None, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    assert run_page(FROM_AN_EVALUATION, names, lambda: capsys.readouterr().out) == 3
    assert len(names["result"].history) == names["result"].before.n == 1
    assert [row["evaluation_results"]["results"][0].score for row in names["before"]] == [0.0]


def test_the_page_of_the_export_runs_with_langfuse(
    art_server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    names: dict[str, Any] = {}
    with ArtClient(art_server.base_url) as client:
        client.create_policy("email-agent")
    with LangfuseServer() as langfuse:
        for name, value in langfuse.environment.items():
            monkeypatch.setenv(name, value)
        page = REPO / "docs" / "traces.md"
        assert run_page(page, names, lambda: capsys.readouterr().out) == 2
        (trace,) = langfuse.traces()
        [priced] = langfuse.models
        (call,) = [one for one in langfuse.spans if one.type == "generation"]
        assert re.search(priced["matchPattern"], call.told("model.name"))
    assert trace == ids.trace_id(names["run"].id)
