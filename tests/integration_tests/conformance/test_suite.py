"""``python -m tests.conformance.suite`` on our server, and on servers that capture wrongly."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner, Result

from langchain_art.errors import ConfigError
from tests.conformance.suite.__main__ import main
from tests.conformance.suite.model import TWINS
from tests.conformance.suite.promises import POLICY, PROMISES, PromiseCheck, Suite, chosen
from tests.support.json_server import JsonServer, Refusal
from tests.support.live_server import ForkedServer, LiveServer
from tests.support.soak import in_soak, in_soak_alone, share

SHAPES = ("Send, one branch retried", "Send into subgraphs", "RetryPolicy around a chain")


def command(*arguments: str) -> Result:
    program = typer.Typer()
    program.command()(main)
    return CliRunner().invoke(program, list(arguments))


@pytest.mark.slow
@pytest.mark.soak
def test_our_server_keeps_what_is_promised(server: ForkedServer, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    which = ("tools", "--mode", "astream") if share() else ("tool is",)  # a third fewer calls
    run = ("--server", server.base_url, "--mode", "invoke", "--only", *which)
    done = command(*run, "--report", str(report))
    assert done.exit_code == 0, done.output
    found = [PromiseCheck(**one) for one in json.loads(report.read_text())["findings"]]
    assert {one.promise for one in found} == set(PROMISES)
    assert {one.state for one in found} == {"held"}, [one for one in found if one.state != "held"]
    assert len({one.topology for one in found}) >= 4


# `test_our_server_keeps_what_is_promised` and `tests/conformance/topologies` show the kind of it.
@in_soak
def test_the_shapes_of_graphs(server: ForkedServer) -> None:
    cases = [pair for name in SHAPES for pair in chosen(name, ["ainvoke"])[:1]]
    found = Suite(server.base_url).run(cases)
    assert len({one.topology for one in found}) == len(SHAPES)
    assert {one.state for one in found} == {"held"}, [one for one in found if one.state != "held"]


class Spoilt(JsonServer):
    """Passes calls on to our server, and spoils an answer on the way."""

    def __init__(self, upstream: str, spoil: Callable[[str, Any], Any]) -> None:
        super().__init__()
        self._upstream, self._spoil = upstream.removesuffix("/v1"), spoil

    def answer(self, path: str, body: Any) -> Any:
        method = "GET" if body is None else "POST"
        answer = httpx.request(method, self._upstream + path, json=body, timeout=60)
        if answer.status_code >= 400:
            raise Refusal(answer.status_code)
        return self._spoil(path, answer.json())


def tokenised_again(path: str, said: Any) -> Any:
    if path.startswith("/v1/calls/"):
        ids = said["token_ids"]
        said["token_ids"] = [i - len(TWINS) if i in TWINS else i for i in ids]
    return said


def shifted(path: str, said: Any) -> Any:
    if path.startswith("/v1/calls/"):
        said["logprobs"] = [said["logprobs"][-1], *said["logprobs"][:-1]]
    return said


def a_record_is_gone(path: str, said: Any) -> Any:
    if path.startswith("/v1/calls/"):
        gone.append(path)
        if len(gone) > 1:  # the first is the suite's own look whether there are records
            raise Refusal(404)
    return said


gone: list[str] = []


def chat_alone(path: str, said: Any) -> Any:
    if not path.endswith("/chat/completions"):
        raise Refusal(404)
    return said


def states(
    server: ForkedServer, spoil: Callable[[str, Any], Any], **of: Any
) -> dict[str, PromiseCheck]:
    """Promises by a server that spoils answers so, and has no audits: nothing is trained."""

    def spoil_all(path: str, said: Any) -> Any:
        if "/audit" in path:
            raise Refusal(404)
        return spoil(path, said)

    with Spoilt(server.base_url, spoil_all) as spoilt:
        cases = chosen("create_agent with tools", ["invoke"])[:1]
        return {one.promise: one for one in Suite(f"{spoilt.url}/v1", **of).run(cases)}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (tokenised_again, "tokenised again"),
        (a_record_is_gone, "no record"),
        in_soak_alone(shifted, "logprobs of the record"),
    ],
)
def test_a_record_that_is_not_what_was_sampled(
    server: ForkedServer, spoil: Callable[[str, Any], Any], words: str
) -> None:
    found = states(server, spoil)
    assert found["exact tokens"].state == "not held" and words in found["exact tokens"].reason
    kinds = {name: one.state for name, one in found.items()}
    assert kinds["captured"] == kinds["judged"] == "held"
    assert kinds["each token once"] == kinds["trained"] == "cannot be checked"
    assert "GET /v1/trajectories/ID/audit" in found["each token once"].reason


def test_a_gateway_with_chat_completions_alone(server: ForkedServer) -> None:
    found = states(server, chat_alone, policy=POLICY)
    assert {name for name, one in found.items() if one.state == "held"} == {"captured", "judged"}
    rest = {one.state for name, one in found.items() if name not in ("captured", "judged")}
    assert rest == {"cannot be checked"}
    assert "GET /v1/calls/ID" in found["exact tokens"].reason
    with pytest.raises(ConfigError, match="--policy"):
        states(server, chat_alone)


def test_another_model_is_told_apart(art_server: LiveServer) -> None:
    with pytest.raises(ConfigError, match="does not serve the conformance model"):
        Suite(art_server.base_url).run(chosen("create_agent with tools")[:1])


def test_mistakes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["suite"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("tests.conformance.suite", run_name="__main__")
    assert "--server http://HOST:PORT/v1" in capsys.readouterr().err
    for arguments, words in (
        (("--only", "no such graph"), "'no such graph'"),
        (("--mode", "quickly"), "quickly"),
    ):
        done = command("--server", "http://127.0.0.1:1/v1", *arguments)
        assert isinstance(done.exception, ConfigError) and words in str(done.exception)
    done = command("--write-model", str(tmp_path / "model"))
    assert done.exit_code == 0 and (tmp_path / "model" / "config.json").exists()
