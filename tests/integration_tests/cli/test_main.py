import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from langchain_art import __version__, packages
from langchain_art.cli import export, main
from langchain_art.cli.load_rollout import load, load_rollout, load_scenarios, rollout_of
from langchain_art.cli.tables import checkpoints_table, run_view, runs_table
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ArtError, ConfigError, NotFound
from langchain_art.tracing.run import Run
from langchain_art.wire import Checkpoint, Trajectory, Turn, Usage
from langchain_art.wire.api_keys import key_problem
from langchain_art.wire.trajectories import EVALUATION
from langchain_art_server.__main__ import cli as server_cli
from tests.support import forked_start
from tests.support.fits import write_fit
from tests.support.live_server import REPO, LiveServer
from tests.support.tiny_models import merge_here, save_model

COMMANDS = {
    *("demo", "new", "serve", "status", "runs", "audit", "checkpoints", "eval", "fits", "curve"),
    *("canary", "export", "key"),
}


def text(command: list[str]) -> str:
    done = CliRunner().invoke(main.app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def refusal(command: list[str]) -> str:
    with pytest.raises((ConfigError, NotFound)) as refused:
        CliRunner().invoke(main.app, command, catch_exceptions=False)
    return str(refused.value)


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Keeps the test's process from turning into another; collects what it would have become."""
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: seen.append(arguments))
    return seen


def test_help_teaches_and_each_command_has_an_example() -> None:
    assert text(["--version"]).strip() == f"langchain-art {__version__}"
    shown = text(["--help"])
    for word in [*COMMANDS, "ART_BASE_URL", "ART_API_KEY"]:
        assert word in shown
    for command in COMMANDS - {"serve"}:
        shown = text([command, "--help"])
        assert f"langchain-art {command}" in shown
        assert "\\b" not in shown and "\b" not in shown


def test_an_error_is_one_message_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["checkpoints", "pin", "no-version"])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert "expected POLICY@N" in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_serve_becomes_the_server_with_the_same_arguments(become: list[list[str]]) -> None:
    for given in (
        ["base", "--policy", "b", "--policy", "a", "--port=9", "--data-dir", "d"],
        ["--lora-rank", "4", "base", "--served-model-name", "-"],
        ["--help"],
    ):
        text(["serve", *given])
        assert become.pop() == [sys.executable, "-m", "langchain_art_server", *given]


def test_the_servers_options_are_shown() -> None:
    command = [sys.executable, "-m", "langchain_art.cli.main", "serve", "--help"]
    done = forked_start.run(command)
    shown = done.stdout
    assert done.returncode == 0 and "langchain-art serve" in shown and "\b" not in shown
    for option in ("--policy", "--data-dir", "--lora-rank", "--database-url"):
        assert option in shown
    wrong = CliRunner().invoke(server_cli, ["base", "--prot", "9"])
    assert wrong.exit_code == 2 and "--prot" in wrong.stderr
    none = CliRunner().invoke(server_cli, [])  # no model
    assert none.exit_code == 1 and "no model" in none.stderr and "--config" in none.stderr


def test_serve_without_its_dependencies_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, become: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("langchain_art.packages.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main.main(["serve", "base"])
    assert 'pip install "langchain-art[local]"' in capsys.readouterr().err
    assert become == []


def test_demo_becomes_the_script_of_an_example(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    become: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # the examples need not be here
    monkeypatch.setenv("PYTHONPATH", "mine")
    judged = ["--reward", "ruler", "--judge", "openai/o3"]
    text(["demo", "--steps", "3", "--seed", "1", "--out", "o", *judged])
    text(["demo", "tic-tac-toe", "--control"])
    text(["demo", "--review", "scripted", "--seed", "1"])
    train = ["--steps", "3", "--seed", "1", "--out", "o", *judged]
    assert [program[2:] for program in become] == [
        ["examples.email_search.train", *train],
        ["examples.tic_tac_toe.train", "--control"],
        ["examples.email_search.review", "--seed", "1"],
    ]
    assert os.environ["PYTHONPATH"].split(os.pathsep)[-2:] == [str(REPO), "mine"]
    for wrong, words in (
        (["chess"], "expected one of: "),
        (["tic-tac-toe", "--review", "scripted"], "expected it of email-search"),
    ):
        with pytest.raises(SystemExit):
            main.main(["demo", *wrong])
        assert words in " ".join(capsys.readouterr().err.split())


def test_a_run_is_shown_turn_by_turn() -> None:
    call = {"function": {"name": "search", "arguments": '{"q": "[Ann]"}'}}
    first = Turn(call_id="a", node="agent", reply={"role": "assistant", "tool_calls": [call]})
    told: Any = {"extends": 0, "attempt": 2, "model": "p@3", "latency": 0.5}
    told |= {"usage": Usage(prompt_tokens=9, completion_tokens=4)}
    told |= {"messages": ({"role": "tool", "content": "3 [mails]"},)}
    told |= {"reply": {"role": "assistant", "content": "On [Monday]. " * 60}}
    turns = (first, Turn(call_id="b", node="agent", **told))
    told = Trajectory(id="t", scenario="q", turns=turns, reward=0.5, error="[oops]")
    shown = in_columns(200, run_view(told), runs_table([told]))
    for word in ['search({"q": "[Ann]"})', "On [Monday].", "attempt 2", "9 + 4", "0.500", "…"]:
        assert word in shown
    for words in ["turn 1, after turn 0", "tool: 3 [mails]", "error: [oops]", "--json"]:
        assert words in shown


def in_columns(width: int, *views: Any) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*views)
    return console.export_text()


def test_tables_fit_a_terminal_of_80_columns() -> None:
    usage = Usage(prompt_tokens=1234, completion_tokens=567)
    turns = (Turn(call_id="a", model="email-agent@17", usage=usage),)
    runs = [
        Trajectory(id=id_, scenario="which-project-was-it", turns=turns, status=status, reward=-0.5)
        for id_, status in (
            ("0b1f6c2a77aa4f0c8e8e6f2ad8f4a001", "completed"),
            ("0b1f6c2a88aa4f0c8e8e6f2ad8f4a001", "interrupted"),
        )
    ]
    evaluated = runs[0].model_copy(update={"id": "f" * 32, "metadata": {EVALUATION: "p@1"}})
    shown = in_columns(80, runs_table([*runs, evaluated])).splitlines()
    assert len([line for line in shown if line.strip()]) == 5, shown
    for words in ("0b1f6c2a7 ", "0b1f6c2a8 ", "interrupted", "-0.500", "1234 + 567", "agent@17"):
        assert any(words in line for line in shown), (words, shown)
    assert " eval " in shown[-1]
    known: Any = {"policy": "email-agent", "version": 117, "name": "email-agent@117"}
    known |= {"parent": 116, "created_at": 0, "bytes": 12_345_678, "pinned": True, "serving": True}
    metrics = {"reward_mean": -0.123, "runs_trained": 128, "tokens_trained": 123456}
    kept = Checkpoint(**known, metrics=metrics)
    row = in_columns(80, checkpoints_table([kept])).splitlines()
    assert len([line for line in row if line.strip()]) == 3, row
    assert any("serves pinned" in line and "email-agent@117" in line for line in row), row


def test_a_program_calls_its_own_model_at_the_address_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_BASE_URL", "http://127.0.0.1:1/v1")
    (tmp_path / "own_address_mod.py").write_text(
        "from langchain_art import ChatART\nmodel = ChatART(model='p')\n"
        "def rollout(s): return model.openai_api_base\n"
    )
    found: Any = rollout_of("own_address_mod:rollout", "p@3", "http://gpu:9000/v1", tmp_path)
    assert found("x") == "http://gpu:9000/v1"


def test_scenarios_are_files_or_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.jsonl").write_text('{"id": 1}\n\n{"id": 2}\n')
    (tmp_path / "my_scenarios_mod.py").write_text(
        "ALL = ['a', 'b']\ndef make(): return iter(ALL)\ndef rollout(s): return 1.0\n"
        "def with_model(s, model): return model.model_name\nBY_NAME = {'a': 1}\n"
    )
    assert load_scenarios("s.jsonl") == [{"id": 1}, {"id": 2}]
    (tmp_path / "s.json").write_text(json.dumps([{"id": 1}, {"id": 2}], indent=1))
    assert load_scenarios("s.json") == [{"id": 1}, {"id": 2}]
    (tmp_path / "s.json").write_text('{"id": 1}\n{"id": 2}\n')
    assert load_scenarios("s.json") == [{"id": 1}, {"id": 2}]
    for name, text in (("m.jsonl", '{"id": 1}\n{"id": 2}\n'), ("m.json", '[{"id": 1}, {"id": 2}]')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")  # as Windows' programs write it
        assert load_scenarios(name) == [{"id": 1}, {"id": 2}]
    assert load_scenarios("my_scenarios_mod:ALL") == ["a", "b"]
    assert load_scenarios("my_scenarios_mod:make") == ["a", "b"]
    rollout: Any = load_rollout("my_scenarios_mod:with_model", "p@3", None, tmp_path).rollout
    assert rollout("x") == "p@3"
    for broken in ("nothing", "no_such_module:x", "my_scenarios_mod:nope"):
        with pytest.raises(ConfigError):
            load(broken)
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "empty.jsonl").write_text("")
    for broken in ("bad.jsonl", "empty.jsonl", "missing.jsonl", "my_scenarios_mod:BY_NAME"):
        with pytest.raises(ConfigError):
            load_scenarios(broken)


@pytest.fixture
def here(art_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    if art_server.api_key:
        monkeypatch.setenv("ART_API_KEY", art_server.api_key)
    return art_server


def test_status_and_runs_for_people_and_for_machines(here: LiveServer, client: ArtClient) -> None:
    assert here.policy in text(["status"])
    assert json.loads(text(["status", "--json"]))["ready"] is True
    assert "No policy 'nobody'" in refusal(["review", "report", "nobody"])
    client.post_trajectory(Trajectory(id="cli-run", scenario="cli", reward=0.5))
    [listed] = json.loads(text(["runs", "--scenario", "cli", "--json"]))
    assert listed["id"] == "cli-run"
    assert "cli-run" in text(["runs", "--scenario", "cli"])
    assert "reward 0.500" in text(["runs", "cli-run"])
    assert json.loads(text(["runs", "cli-run", "--json"]))["reward"] == 0.5


def test_the_beginning_of_an_id_is_enough(here: LiveServer, client: ArtClient) -> None:
    said = ({"role": "user", "content": "Which [project]?"},)
    turns = (Turn(call_id="begun-x", messages=said, reply={"role": "assistant", "content": "F"}),)
    for name in ("begun-0a17", "begun-0a18", "begun-0A19"):
        client.post_trajectory(Trajectory(id=name, scenario=f"of {name}", turns=turns))
    shown = text(["runs", "begun-0a17"])
    assert "user: Which [project]?" in shown and "reply: F" in shown
    assert "begun-0A19" in text(["runs", "begun-0A…"])
    assert "begun-0A19" in text(["audit", "begun-0A"])
    both = CliRunner().invoke(main.app, ["audit", "begun-0a"]).exception
    assert isinstance(both, ConfigError) and "write more" in str(both)
    assert "begun-0a17  of begun-0a17" in str(both) and "begun-0a18" in str(both)
    assert "begun-0A19" not in str(both)
    for unknown in ("begun-9", "begun_0a17"):
        none = CliRunner().invoke(main.app, ["runs", unknown]).exception
        assert isinstance(none, NotFound) and "`langchain-art runs` lists them" in str(none)
    assert "begun-0a18 is deleted" in text(["runs", "begun-0a18", "--delete"])


def test_a_run_stands_for_its_id(client: ArtClient) -> None:
    run = Run(id="stands-for-itself", scenario="cli")
    run.reward = 1.0
    client.post_trajectory(run.trajectory())
    assert client.audit(run).trajectory == client.trajectory(run).id == run.id
    assert client.audit(run.trajectory()).reward == 1.0
    assert client.delete_trajectory(run) == run.id


def test_checkpoints_are_managed(here: LiveServer, client: ArtClient) -> None:
    client.create_policy("cli-policy")
    assert "cli-policy@0" in text(["checkpoints", "list", "cli-policy"])
    assert "is pinned" in text(["checkpoints", "pin", "cli-policy@0"])
    [listed] = json.loads(text(["checkpoints", "list", "cli-policy", "--json"]))
    assert listed["pinned"] is True
    assert "no longer pinned" in text(["checkpoints", "unpin", "cli-policy@0"])
    assert "now serves @0" in text(["checkpoints", "rollback", "cli-policy@0"])


def test_an_adapter_is_exported_with_its_card(here: LiveServer, tmp_path: Path) -> None:
    said = text(["export", here.policy, str(tmp_path / "adapter")])
    assert f"names its base by the folder {here.model}: edit that; who lacks" in said
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= names
    with pytest.raises(SystemExit):
        main.main(["export", here.policy, str(tmp_path / "adapter")])
    with pytest.raises(SystemExit):
        main.main(["export", f"{here.policy}@999", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()
    for more in ([], ["--merge", "--base", here.model]):
        assert "cannot be written" in refusal(["export", here.policy, "/proc/none", *more])


def test_merged_weights_load_as_any_model(
    here: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", forked_start.run)
    command = ["export", here.policy, str(tmp_path / "whole"), "--base", here.model]
    shown = text([*command, "--merge", "--float32"])
    assert "merged in float32: less than 0.01% of what was trained is lost" in shown
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "adapter_model.safetensors" not in names
    assert "merged into these weights" in (tmp_path / "whole" / "README.md").read_text()


def test_what_cannot_be_merged_is_said_in_a_line(
    here: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: ArtClient
) -> None:
    other, whole = save_model(tmp_path / "other"), tmp_path / "whole"
    monkeypatch.setattr("langchain_art.cli.export.subprocess.run", merge_here)
    with pytest.raises(ArtError, match="cannot be put on") as failed:
        export.export_merged(client, here.policy, 0, whole, str(other))
    assert "\n" not in str(failed.value) and "pip install" not in str(failed.value)
    # Before anything is fetched.
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was merged"))
    with pytest.raises(ConfigError, match="folder /not/here, which is not on this machine"):
        export.export_merged(client, here.policy, 0, whole, "/not/here")
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "peft" else name)
    with pytest.raises(ConfigError, match=r"needs peft, .*: pip install"):
        export.export_merged(client, here.policy, 0, whole, here.model)
    refused = CliRunner().invoke(main.app, ["export", here.policy, str(whole), "--float32"])
    assert isinstance(refused.exception, ConfigError) and "--merge" in str(refused.exception)
    assert not whole.exists()


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
    assert "none.jsonl" in refusal([*command[:2], "none.jsonl", *command[3:]])
    assert "cli_eval_mod" not in sys.modules, "the program is not run for nothing"
    found = json.loads(text([*command, "--samples", "2", "--json"]))
    assert (found["n"], found["versions"]) == (4, [f"{here.policy}@0"])
    assert f"{here.policy}@0:" in text(command)
    kept = json.loads(text(["runs", "--scenario", "a", "--json"]))
    assert [run["metadata"] for run in kept[:3]] == [{EVALUATION: f"{here.policy}@0"}] * 3
    assert " eval " in text(["runs", "--scenario", "a"])


def test_eval_samples_with_the_rollouts_own_settings(
    here: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval_settings.py").write_text(
        "from langchain_art import ChatART\n"
        f"llm = ChatART(model={here.policy!r}, max_tokens=3, temperature=1.0)\n"
        "async def rollout(scenario):\n"
        "    reply = await llm.ainvoke(scenario['q'])\n"
        "    return float(reply.usage_metadata['output_tokens'])\n"
    )
    (tmp_path / "s.jsonl").write_text('{"id": "a", "q": "Hi"}\n{"id": "b", "q": "Ho"}\n')
    trained = {here.policy: {"max_tokens": 48, "temperature": 1.0}}
    write_fit(tmp_path / "out" / "trained", [0.5], policies=(here.policy,), models=trained)
    command = ["eval", "eval_settings:rollout", "s.jsonl", "--policy", f"{here.policy}@0", "--json"]
    done = CliRunner().invoke(main.app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["mean"] <= 3 and found["versions"] == [f"{here.policy}@0"]
    words = "max_tokens is 3 here and was 48 in training (out/trained)"
    assert words in done.stderr and "temperature" not in done.stderr


def test_eval_fails_at_the_first_run_of_another_version(
    here: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval_versions_mod.py").write_text(
        "from langchain_art import ChatART\n"
        "runs = []\n"
        "async def rollout(scenario):\n"
        "    runs.append(scenario)\n"
        f"    await ChatART(model={here.policy + '@0'!r}, max_tokens=3).ainvoke('Hi')\n"
        "    return 1.0\n"
    )
    (tmp_path / "s.jsonl").write_text('{"q": 1}\n{"q": 2}\n{"q": 3}\n')
    command = ["eval", "eval_versions_mod:rollout", "s.jsonl", "--policy", f"{here.policy}@1"]
    failed = CliRunner().invoke(main.app, [*command, "--concurrency", "1"])
    assert f"was sampled from ['{here.policy}@0']" in str(failed.exception)
    assert len(sys.modules["eval_versions_mod"].runs) == 1


def test_eval_takes_the_fits_settings_where_a_rollout_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no_model_mod.py").write_text("def rollout(scenario, model): return 1.0\n")
    plain = load_rollout("no_model_mod:rollout", "p@3", None, Path("out"))
    assert plain.model is not None and plain.model.max_tokens is None
    assert "no max_tokens" in plain.notes[0]
    write_fit(Path("out/t"), [0.5], models={"p": {"max_tokens": 48}})
    loaded = load_rollout("no_model_mod:rollout", "p@3", None, Path("out"))
    assert loaded.model is not None
    assert (loaded.model.max_tokens, loaded.model.model_name) == (48, "p@3")
    assert "those of training (out/t)" in loaded.notes[0]


def test_a_new_key_is_one_that_a_server_takes() -> None:
    keys = [text(["key", "new"]) for _ in range(2)]
    assert keys[0] != keys[1]
    assert [key_problem(key.strip()) for key in keys] == [None, None]
