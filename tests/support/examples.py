"""What the tests of the examples share: a short fit on an example's own model, a hosted model."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from langchain_openai import ChatOpenAI
from typer.testing import CliRunner

from examples.support.command import evaluate_command
from examples.support.demo import Demo, run
from tests.support.json_server import JsonServer, completion
from tests.support.live_server import ForkedServer


@contextmanager
def server_of(demo: Demo, folder: Path) -> Iterator[ForkedServer]:
    """A real server with the example's base model."""
    with ForkedServer(folder / "data", model=demo.base_model) as server:
        yield server


def short_fit(
    demo: Demo, base_url: str, out: Path, steps: int = 1, *, more: Any = None, **sizes: Any
) -> dict[str, Any]:
    """The demo in small; what its ``summary.json`` holds, having checked the files beside it."""
    small = {"groups_per_step": 4, "group_size": 4, "held_out": 4} | sizes
    found = run(replace(demo, **small), out=out, steps=steps, base_url=base_url, more=more)
    assert json.loads((out / "summary.json").read_text()) == found
    assert found["steps"] == steps
    assert found["before"]["n"] == found["after"]["n"] == small["held_out"]
    assert (out / "reward.png").stat().st_size > 10_000
    page = (out / "transcripts.md").read_text()
    assert "## Before: " in page and "## After: " in page
    return found


def evaluation(demo: Demo, *arguments: str) -> str:
    """The figures that the evaluation of an example prints."""
    return _said(evaluate_command(demo), 0, *arguments)


def refusal(main: Callable[..., Any], *arguments: str) -> str:
    """What a demo's command says to options that it does not take."""
    return " ".join(_said(main, 2, *arguments).replace("│", " ").split())


def _said(main: Callable[..., Any], status: int, *arguments: str) -> str:
    program = typer.Typer()
    program.command()(main)
    done = CliRunner().invoke(program, list(arguments))
    assert done.exit_code == status, done.output
    return done.output if status else done.stdout


def steps_of(fit: Path) -> list[dict[str, Any]]:
    """What each step of a fit trained, by policy."""
    lines = map(json.loads, (fit / "history.jsonl").read_text().splitlines())
    return [line["results"] for line in lines if line["kind"] == "step"]


def calling(name: str, /, **arguments: Any) -> dict[str, Any]:
    """A reply of a `HostedModel` that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": f"c-{name}", "type": "function", "function": function}]}


class HostedModel(JsonServer):
    """OpenAI's API on loopback; `reply` makes of a request's body the message that is answered."""

    def __init__(self, reply: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__()
        self._reply = reply

    @property
    def chat(self) -> ChatOpenAI:
        """The chat model of a user of that API."""
        return ChatOpenAI(model="hosted", base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def answer(self, path: str, body: Any) -> Any:
        assert path == "/v1/chat/completions", path
        message = {"role": "assistant", "content": ""} | self._reply(body)
        return completion(body["model"], message, 1, 1)


def require_same_base(made: Path, shipped: Path) -> None:
    """A base model that a script makes has the tokenizer, template and config of the shipped one.

    The release of transformers that wrote the config may be another.
    """
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (made / name).read_bytes() == (shipped / name).read_bytes(), name
    ours, theirs = (json.loads((one / "config.json").read_text()) for one in (made, shipped))
    assert ours | {"transformers_version": ""} == theirs | {"transformers_version": ""}
