from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from langchain_art.cli import export, main
from langchain_art.cli.load_rollout import load, load_rollout, load_scenarios
from langchain_art.cli.tables import run_table, runs_table
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.wire import Checkpoint, Trajectory, Turn, Usage
from langchain_art.wire.api_keys import key_problem
from tests.support.live_server import BASE_MODEL, LiveServer

COMMANDS = [
    "demo",
    "serve",
    "status",
    "runs",
    "audit",
    "checkpoints",
    "eval",
    "canary",
    "export",
    "key",
]


def text(command: list[str]) -> str:
    done = CliRunner().invoke(main.app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Keeps the test's process from turning into another; collects what it would have become."""
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: seen.append(arguments))
    return seen


def test_help_teaches() -> None:
    shown = text(["--help"])
    for word in [*COMMANDS, "ART_BASE_URL", "ART_API_KEY"]:
        assert word in shown


def served(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`langchain-art serve`, which the server's own parser answers in the same process."""
    command = [sys.executable, "-m", "langchain_art.cli.main", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_an_example(command: str) -> None:
    shown = served("--help").stdout if command == "serve" else text([command, "--help"])
    assert f"langchain-art {command}" in shown
    assert "\\b" not in shown
    assert "\b" not in shown


def test_an_error_is_one_message_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["checkpoints", "pin", "no-version"])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert "expected POLICY@N" in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    "given",
    [
        ["base", "--policy", "b", "--policy", "a", "--port=9", "--data-dir", "d"],
        ["--lora-rank", "4", "base", "--served-model-name", "-"],
        ["--help"],
    ],
)
def test_serve_becomes_the_server_with_the_same_arguments(
    given: list[str], become: list[list[str]]
) -> None:
    text(["serve", *given])
    assert become == [[sys.executable, "-m", "langchain_art_server", *given]]


def test_the_servers_options_are_shown() -> None:
    shown = served("--help").stdout
    for option in ("--policy", "--data-dir", "--lora-rank", "--database-url"):
        assert option in shown
    wrong = served("base", "--prot", "9")
    assert wrong.returncode == 2 and "--prot" in wrong.stderr


def test_serve_without_its_dependencies_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, become: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("langchain_art.client.local_server.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main.main(["serve", "base"])
    assert 'pip install "langchain-art[local]"' in capsys.readouterr().err
    assert become == []


def test_serve_without_a_model_says_so() -> None:
    done = served()
    assert done.returncode == 1 and "no model" in done.stderr and "--config" in done.stderr


def test_demo_needs_a_checkout(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    become: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main.main(["demo"])
    assert "Clone the repository" in capsys.readouterr().err
    (tmp_path / "examples" / "email_search").mkdir(parents=True)
    (tmp_path / "examples" / "email_search" / "train.py").touch()
    judged = ["--reward", "ruler", "--judge", "openai/o3"]
    text(["demo", "--steps", "3", "--seed", "1", "--out", "o", *judged])
    [arguments] = become
    assert arguments[:3] == [sys.executable, "-m", "examples.email_search.train"]
    assert arguments[3:] == ["--steps", "3", "--seed", "1", "--out", "o", *judged]


def test_a_run_is_shown_turn_by_turn() -> None:
    call = {"function": {"name": "search", "arguments": '{"q": "[Ann]"}'}}
    turns = (
        Turn(call_id="a", node="agent", reply={"role": "assistant", "tool_calls": [call]}),
        Turn(
            call_id="b",
            node="agent",
            extends=0,
            attempt=2,
            model="p@3",
            usage=Usage(prompt_tokens=9, completion_tokens=4),
            latency=0.5,
            reply={"role": "assistant", "content": "On [Monday]. " * 20},
        ),
    )
    told = Trajectory(id="t", scenario="q", turns=turns, reward=0.5, error="[oops]")
    from rich.console import Console

    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(run_table(told), runs_table([told]))
    shown = console.export_text()
    for word in ['search({"q": "[Ann]"})', "On [Monday].", "attempt 2", "9 + 4", "0.500", "…"]:
        assert word in shown


def test_scenarios_are_files_or_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.jsonl").write_text('{"id": 1}\n\n{"id": 2}\n')
    (tmp_path / "my_scenarios_mod.py").write_text(
        "ALL = ['a', 'b']\ndef make(): return iter(ALL)\ndef rollout(s): return 1.0\n"
        "def with_model(s, model): return model.model_name\n"
    )
    assert load_scenarios("s.jsonl") == [{"id": 1}, {"id": 2}]
    assert load_scenarios("my_scenarios_mod:ALL") == ["a", "b"]
    assert load_scenarios("my_scenarios_mod:make") == ["a", "b"]
    rollout: Any = load_rollout("my_scenarios_mod:with_model", "p@3", None)
    assert rollout("x") == "p@3"
    for broken in ("nothing", "no_such_module:x", "my_scenarios_mod:nope"):
        with pytest.raises(ConfigError):
            load(broken)
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "empty.jsonl").write_text("")
    for broken in ("bad.jsonl", "empty.jsonl", "missing.jsonl"):
        with pytest.raises(ConfigError):
            load_scenarios(broken)


def test_the_card_says_what_it_is() -> None:
    checkpoint = Checkpoint(
        policy="p", version=3, name="p@3", parent=2, created_at=0, bytes=1, metrics={"loss": 0.25}
    )
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj"]}
    shown = export.card(checkpoint, config, "org/base")
    for word in ["base_model: org/base", "rank | 8", "alpha | 16", "k_proj, q_proj", "loss | 0.25"]:
        assert word in shown
    for word in ["PeftModel", "vllm serve org/base", "licence applies"]:
        assert word in shown


# --- against the real server ------------------------------------------------------------------


@pytest.fixture
def here(art_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    if art_server.api_key:
        monkeypatch.setenv("ART_API_KEY", art_server.api_key)
    return art_server


def test_status_for_people_and_for_machines(here: LiveServer) -> None:
    assert here.policy in text(["status"])
    assert json.loads(text(["status", "--json"]))["ready"] is True


def test_runs_are_listed_and_shown(here: LiveServer) -> None:
    with ArtClient() as client:
        client.post_trajectory(Trajectory(id="cli-run", scenario="cli", reward=0.5))
    [listed] = json.loads(text(["runs", "--scenario", "cli", "--json"]))
    assert listed["id"] == "cli-run"
    assert "cli-run" in text(["runs", "--scenario", "cli"])
    assert "reward 0.500" in text(["runs", "cli-run"])
    assert json.loads(text(["runs", "cli-run", "--json"]))["reward"] == 0.5


def test_checkpoints_are_managed(here: LiveServer) -> None:
    with ArtClient() as client:
        client.create_policy("cli-policy")
    assert "cli-policy@0" in text(["checkpoints", "list", "cli-policy"])
    assert "is pinned" in text(["checkpoints", "pin", "cli-policy@0"])
    [listed] = json.loads(text(["checkpoints", "list", "cli-policy", "--json"]))
    assert listed["pinned"] is True
    assert "no longer pinned" in text(["checkpoints", "unpin", "cli-policy@0"])
    assert "now serves @0" in text(["checkpoints", "rollback", "cli-policy@0"])


def test_an_adapter_is_exported_with_its_card(here: LiveServer, tmp_path: Path) -> None:
    text(["export", here.policy, str(tmp_path / "adapter")])
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= names
    with pytest.raises(SystemExit):
        main.main(["export", here.policy, str(tmp_path / "adapter")])
    with pytest.raises(SystemExit):
        main.main(["export", f"{here.policy}@999", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


def test_merged_weights_load_as_any_model(here: LiveServer, tmp_path: Path) -> None:
    text(["export", here.policy, str(tmp_path / "whole"), "--merge", "--base", str(BASE_MODEL)])
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "adapter_model.safetensors" not in names
    assert "merged into these weights" in (tmp_path / "whole" / "README.md").read_text()


def test_eval_measures_the_policy_it_is_told(
    here: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cli_eval_mod.py").write_text(
        "async def rollout(scenario, model):\n"
        "    reply = await model.bind(max_tokens=4).ainvoke(scenario['q'])\n"
        "    return float(len(reply.text) > 0)\n"
    )
    (tmp_path / "s.jsonl").write_text('{"id": "a", "q": "Hi"}\n{"id": "b", "q": "Ho"}\n')
    command = ["eval", "cli_eval_mod:rollout", "s.jsonl", "--policy", f"{here.policy}@0"]
    found = json.loads(text([*command, "--samples", "2", "--json"]))
    assert (found["n"], found["versions"]) == (4, [f"{here.policy}@0"])
    assert f"{here.policy}@0:" in text(command)


def test_a_new_key_is_one_that_a_server_takes() -> None:
    keys = [text(["key", "new"]) for _ in range(2)]
    assert keys[0] != keys[1]
    assert [key_problem(key.strip()) for key in keys] == [None, None]
