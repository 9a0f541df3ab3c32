"""The page of the export runs as it stands, with Langfuse's stub."""

import re
from pathlib import Path
from typing import Any

import pytest

from langchain_art import ArtClient
from langchain_art.export import ids
from tests.support.langfuse_server import LangfuseServer
from tests.support.live_server import LiveServer
from tests.support.pages import REPO, run_page


def test_every_block_runs_and_prints_what_it_says(
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
