"""Demos in small on a real server: a fit, its figures, and the evaluation of its version.

What calls learned: `test_deep_agent.py`.
"""

import json
import re
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from examples.codenames import compare
from examples.codenames.train import DEMO as CODENAMES
from examples.email_search.train import BASE_MODEL
from examples.mcp_server.train import DEMO as MCP
from examples.mcp_server.train import main
from examples.text_to_sql.train import DEMO as TEXT_TO_SQL
from examples.tic_tac_toe.train import DEMO as TIC_TAC_TOE
from examples.triage.train import DEMO as TRIAGE
from langchain_art import ArtClient
from tests.support.examples import evaluation, refusal, server_of, short_fit, steps_of
from tests.support.soak import in_soak_alone

pytestmark = pytest.mark.slow


# Those in `make soak` alone are fits of the kinds below, of other agents.
@pytest.mark.parametrize(
    ("name", "policy", "measured"),
    [
        ("text_to_sql", "sql-agent", "first query right"),
        in_soak_alone("deep_research", "research-agent", "plan"),
        in_soak_alone("email_assistant", "email-assistant", "success, "),
        in_soak_alone("temporal_clue", "detective", "all_right"),
        in_soak_alone("twenty_forty_eight", "2048", "highest_tile"),
    ],
)
def test_a_short_fit_and_the_evaluation_of_its_version(
    name: str, policy: str, measured: str, tmp_path: Path
) -> None:
    demo = import_module(f"examples.{name}.train").DEMO
    with server_of(demo, tmp_path) as server:
        found = short_fit(demo, server.base_url, tmp_path / "out")
        said = evaluation(demo, f"{policy}@1", "--base-url", server.base_url, "--n", "2")
    assert f"{policy}@1: " in said and measured in said
    assert any(one.startswith(measured) for one in found["measures"])
    for when in ("before", "after"):
        assert 0 <= found[when]["mean"] <= 1  # rewards of calls would come on top
    if demo == TEXT_TO_SQL:
        history = (tmp_path / "out" / "history.jsonl").read_text()
        assert all(f'"{node}":{{"calls"' in history for node in ("write", "check", "rewrite"))


def test_the_mcp_agent_is_trained_on_the_judge_alone(tmp_path: Path) -> None:
    with server_of(MCP, tmp_path) as server:
        found = short_fit(MCP, server.base_url, tmp_path / "out", groups_per_step=2, held_out=2)
        assert found["excluded"].get("groups.unjudged", 0) == 0
        with ArtClient(server.base_url) as client:
            runs = client.trajectories(1000)
    judged = {str(run.scenario).split("-")[0]: "judged" in run.metadata for run in runs}
    assert judged == {"train": True, "test": False}
    tasks = json.loads((tmp_path / "out" / "tasks.json").read_text())
    about = {split: {task["about"] for task in tasks[split]} for split in ("train", "test")}
    assert about["train"] and about["test"] and not about["train"] & about["test"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--server", "uvx other"], "name models"),
        (["--server", "x", "--task-writer", "openai/o3", "--judge", "openai/o3"], "a real model"),
    ],
)
def test_another_mcp_server_takes_real_models(
    options: list[str], words: str, tmp_path: Path
) -> None:
    assert words in refusal(main, *options, "--out", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_tic_tac_toe_both_sides_learn_and_older_versions_do_not(tmp_path: Path) -> None:
    with server_of(TIC_TAC_TOE, tmp_path) as server:
        found = short_fit(TIC_TAC_TOE, server.base_url, tmp_path / "out", 2)
        with ArtClient(server.base_url) as client:
            runs = client.trajectories(1000)
    for when in ("before", "after"):
        draws, losses = (found["measures"][name][when]["mean"] for name in ("draws", "losses"))
        assert draws == found[when]["mean"] and draws + losses == 1
    turns = [turn for run in runs for turn in run.turns]
    assert {turn.node for turn in turns} == {"x", "o", "older"}
    assert "tic-tac-toe@0" in {turn.model for turn in turns if turn.node == "older"}
    for run in runs:
        rewarded = [turn.node for turn in run.turns if turn.reward is not None]
        if str(run.scenario).startswith("train"):
            assert run.reward is None
            assert sorted(rewarded) == sorted({t.node for t in run.turns} - {"older"})
        else:
            assert run.reward in (0.0, 1.0) and not rewarded
    assert found["excluded"]["calls.frozen"] > 0


def test_triage_sets_nothing_and_is_evaluated_with_solved_examples(tmp_path: Path) -> None:
    """On the demo's small model, which routes by chance."""
    small = replace(TRIAGE, base_model=BASE_MODEL)
    with server_of(small, tmp_path) as server:
        short_fit(small, server.base_url, tmp_path / "out")
        state = json.loads((tmp_path / "out" / "fit.json").read_text())
        assert state["identity"]["config"]["learning_rate"] is None
        assert min(state["learning_rate"].values()) > 0
        asked = ("--base-url", server.base_url, "--n", "2", "--few-shot", "1")
        assert "triage@" in evaluation(TRIAGE, *asked)
        with ArtClient(server.base_url) as client:
            told = [len(one.turns[0].messages) for one in client.trajectories(200)]
        assert told.count(4) == 2 and told.count(2) == len(told) - 2


def test_codenames_trains_each_role_on_its_own_calls_and_compares_one_adapter_with_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arm in ("DEMO", "ONE"):
        # Rewards are few at first: with 4 groups of 4, all four were of equal rewards now and then.
        small = replace(getattr(compare, arm), groups_per_step=4, group_size=8, held_out=4)
        monkeypatch.setattr(compare, arm, small)
    with server_of(CODENAMES, tmp_path) as server:
        monkeypatch.setattr(compare, "run", partial(compare.run, base_url=server.base_url))
        compare.main(seeds=1, steps=1)
        mixed = ["spymaster@1", "guesser@0", "--n", "2", "--base-url", server.base_url]
        evaluated = evaluation(CODENAMES, *mixed)
    said = capsys.readouterr().out
    folders = [tmp_path / "out" / f"demo-codenames{arm}" for arm in ("", "-one")]
    two, one = (json.loads((folder / "summary.json").read_text()) for folder in folders)
    assert (two["adapter"], one["adapter"]) == ("spymaster@1 + guesser@1", "player@1")
    assert two["measures"]["legal_clues"]["after"]["n"] == 4
    apart = two["after"]["mean"] - one["after"]["mean"]
    spread = (two["after"]["ci95"] ** 2 + one["after"]["ci95"] ** 2) ** 0.5
    for what in ("seed 0", "all seeds"):
        assert f"{what}: two adapters less one: {apart:+.3f} ± {spread:.3f}" in said
    for name, found in (("two adapters", two), ("one adapter", one)):
        assert found["tokens_trained"] > 0
        assert re.search(rf"{name}: .*; {found['tokens_trained']} tokens trained on", said)
    [step] = steps_of(folders[0])
    for role, other in (("spymaster", "guesser"), ("guesser", "spymaster")):
        nodes = step[role]["nodes"]
        assert nodes[role]["calls"] > 0 and not nodes[other]["calls"], nodes
    assert re.search(r"spymaster@1 \+ guesser@0: [01]\.\d+ ± 0\.\d+ \(n=2\)", evaluated)
    assert "good_clues: " in evaluated and "assassin_met: " in evaluated
