"""A fit exports every run once, whatever the destination does, and hardly waits for it."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from langchain_core.tools import tool
from typer.testing import CliRunner

from langchain_art import ArtClient, Exporter, Trainer
from langchain_art.cli.main import app
from langchain_art.export.destinations import REQUEST
from langchain_art.export.spool import Spool
from tests.support.graphs import ASK, Scripted, graph_of, node
from tests.support.langfuse_server import LangfuseServer
from tests.support.live_server import LiveServer
from tests.support.soak import in_soak_alone
from tests.support.trainers import said, trainer_of

GROUPS, SIZE, STEPS = 2, 2, 2


def trainer(art_server: LiveServer, folder: Path, exporter: Exporter) -> Trainer:
    options = {"group_size": SIZE, "groups_per_step": GROUPS, "dynamic_sampling_rounds": 0}
    return trainer_of(art_server, folder / "fit", export=exporter, **options)


async def rollout(scenario: str) -> float:
    """A graph whose model answers at once: the fits of a fault table take a second each."""
    await graph_of(writer=node(Scripted(lines=["Monday"]))).compile().ainvoke(ASK)
    return float(len(scenario))


@tool
def search(query: str) -> str:
    """Search."""
    return query


async def look_up(scenario: str) -> float:
    """A run whose record, and no turn of it, shows a tool."""
    await search.ainvoke({"query": scenario})
    return 1.0


#: In ``make test`` one without an answer, one without a server, and each kind of refusal.
#: `python -m benchmarks export` has 20 steps for each, and their seconds.
FAULTS = ["hang", "refused", "500", "401", *map(in_soak_alone, ("429", "slow", "die"))]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fit_hardly_waits_and_loses_nothing(
    fault: Any,
    art_server: LiveServer,
    langfuse: LangfuseServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    langfuse.fault = fault
    exporter = Exporter()
    fit = trainer(art_server, tmp_path, exporter)
    await fit.fit(rollout, ["a", "bb", "ccc"], steps=STEPS)
    assert exporter.waited < REQUEST  # for no request's end
    spool = Spool(tmp_path / "fit/spool")
    told = said(fit)
    left = spool.count()
    assert left > 0 and f"{left} are in {spool.folder}" in told
    assert told.count("Langfuse did not take runs") == 1 and told.count("Langfuse:") == 1

    langfuse.fault = None
    deadline = time.monotonic() + 2 * REQUEST
    while True:  # the fit's own thread may be in a last request, which it gives up
        result = CliRunner().invoke(app, ["review", "push", "--spool", str(spool.folder)])
        if "Another process sends" not in str(result.exception) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert result.exit_code == 0, result.output
    assert spool.count() == 0 and f"{left} runs sent" in result.output
    assert len(langfuse.traces()) == STEPS * GROUPS * SIZE
    scored = Counter(score.name for score in langfuse.scores.values())
    assert scored["reward"] == STEPS * GROUPS * SIZE


async def test_a_large_evaluation_is_exported_with_all_that_was_recorded(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("langchain_art.training.fit_export.LEAST_KEPT", 1)
    many = trainer(art_server, tmp_path, Exporter("otlp"))
    with ArtClient(art_server.base_url) as client:
        client.create_policy(many.policy)
    await many.evaluate(look_up, [f"q{number}" for number in range(40)], samples=2)
    spool = tmp_path / "fit/spool"
    runs = [one for path in spool.glob("*.runs") for one in json.loads(path.read_text())["runs"]]
    kinds = [{span["kind"] for span in run["spans"]} for run in runs]
    assert len(kinds) == 80 and all("tool" in some for some in kinds)
