"""Codenames: both roles learn from one reward, each on its own calls; a hosted model plays it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from examples.codenames import build_base_model, evaluate
from examples.codenames.environment import boards
from examples.codenames.train import BASE_MODEL, DEMO, ROLES, make_rollout
from examples.codenames.words import KIND_OF, KINDS
from examples.support.demo import run
from langchain_art import ArtClient
from langchain_art_server.config import load_settings
from tests.support.hosted_model import HostedModel
from tests.support.live_server import LiveServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    started = LiveServer(tmp_path_factory.mktemp("codenames") / "data", model=BASE_MODEL).start()
    yield started
    started.stop()


@pytest.mark.slow
def test_both_roles_learn_and_any_pair_of_versions_is_evaluated(
    server: LiveServer, tmp_path: Path
) -> None:
    small = replace(DEMO, held_out=60)
    found = run(small, out=tmp_path, steps=4, base_url=server.base_url)
    before, after = found["before"], found["after"]
    assert after["mean"] - before["mean"] > 0.1, found
    assert set(found["measures"]) >= {"good_clues", "guesses_follow_clue", "assassin_met"}
    with ArtClient(server.base_url) as client:
        for role in ROLES:
            assert client.policy(role).version == 4, "each has versions of its own"
    command = typer.Typer()
    command.command()(evaluate.main)
    asked = ["spymaster@4", "guesser@0", "--n", "20", "--base-url", server.base_url]
    done = CliRunner().invoke(command, asked)
    assert done.exit_code == 0, done.output
    assert re.search(r"spymaster@4 \+ guesser@0: 0\.\d+ ± 0\.\d+ \(n=20\)", done.output)
    assert re.search(r"good_clues: [01]\.\d+ ± ", done.output)


def player(messages: list[dict[str, Any]]) -> str:
    """A hosted player that knows kinds of things, and reads what the program tells it."""
    told = dict(line.split(": ", 1) for line in messages[-1]["content"].splitlines())
    if "own" in told:
        kind, count = Counter(KIND_OF[card] for card in told["own"].split()).most_common(1)[0]
        return f"Clue: {kind} {count}"
    kind = told["clue"].split()[0]
    return "guess: " + ", ".join(card for card in told["board"].split() if card in KINDS[kind])


async def test_the_program_runs_on_a_hosted_model() -> None:
    with HostedModel(player) as hosted:
        rollout = make_rollout(hosted.chat, hosted.chat)
        runs = [await rollout(board) for board in boards("test", 3, 0)]
    assert [run.reward for run in runs] == [1.0, 1.0, 1.0]
    assert all(run.scores["good_clues"] == 1.0 for run in runs)
    assert {turn.node for run in runs for turn in run.turns} == set(ROLES)


def test_the_settings_for_a_card_are_accepted() -> None:
    settings = load_settings(Path("examples/codenames/server.toml"))
    assert settings.policies == ROLES


@pytest.mark.slow
def test_the_script_still_builds_the_base_model(tmp_path: Path) -> None:
    build_base_model.main(["--smoke", "--out", str(tmp_path)])
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        assert (tmp_path / name).read_bytes() == (BASE_MODEL / name).read_bytes(), name
