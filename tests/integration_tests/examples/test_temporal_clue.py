"""Temporal Clue: the detective learns whose clue counts; a hosted model answers as well."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from examples.support.demo import run
from examples.temporal_clue import build_base_model, evaluate
from examples.temporal_clue.environment import QUESTIONS, puzzles
from examples.temporal_clue.train import BASE_MODEL, DEMO, make_rollout
from langchain_art_server.config import load_settings
from tests.support.hosted_model import HostedModel
from tests.support.live_server import LiveServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    started = LiveServer(tmp_path_factory.mktemp("clue") / "data", model=BASE_MODEL).start()
    yield started
    started.stop()


@pytest.mark.slow
def test_the_detective_learns_and_a_version_is_evaluated(
    server: LiveServer, tmp_path: Path
) -> None:
    small = replace(DEMO, held_out=80)
    found = run(small, out=tmp_path, steps=6, base_url=server.base_url)
    before, after = found["before"], found["after"]
    assert after["mean"] - before["mean"] > 0.1, found
    assert set(found["measures"]) == {*QUESTIONS, "all_right"}
    command = typer.Typer()
    command.command()(evaluate.main)
    asked = ["detective@6", "--n", "20", "--greedy", "--base-url", server.base_url]
    done = CliRunner().invoke(command, asked)
    assert done.exit_code == 0, done.output
    assert re.search(r"detective@6: [01]\.\d+ ± 0\.\d+ \(n=20\)", done.output)


def detective(messages: list[dict[str, Any]]) -> str:
    """A hosted model that thinks first, and answers with the row that the last clue is about."""
    *records, thief = messages[-1]["content"].splitlines()
    value = thief.rstrip(".").split()[-1]
    (row,) = [line for line in records if value in line.rstrip(".").split()]
    said = re.fullmatch(r"(\w+) was in the (\w+) at (\w+) with the (\w+)\.", row)
    assert said is not None
    lines = [f"{name}: {one}" for name, one in zip(QUESTIONS, said.groups(), strict=True)]
    return "\n".join([f"It is about {value}.", *lines])


async def test_the_program_runs_on_a_hosted_model() -> None:
    with HostedModel(detective) as hosted:
        rollout = make_rollout(hosted.chat)
        runs = [await rollout(puzzle) for puzzle in puzzles("test", 3, 0)]
    assert [run.reward for run in runs] == [1.0, 1.0, 1.0]
    assert all(run.scores["all_right"] == 1.0 for run in runs)


def test_the_settings_for_a_card_are_accepted() -> None:
    settings = load_settings(Path("examples/temporal_clue/server.toml"))
    assert settings.policies == DEMO.policies


@pytest.mark.slow
def test_the_script_still_builds_the_base_model(tmp_path: Path) -> None:
    build_base_model.main(["--smoke", "--out", str(tmp_path)])
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        assert (tmp_path / name).read_bytes() == (BASE_MODEL / name).read_bytes(), name
