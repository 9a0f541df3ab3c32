"""The example of an agent that was written for a hosted model: as it was, and trained."""

import difflib
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_art import ArtClient
from tests.support.examples import steps_of
from tests.support.live_server import REPO, LiveServer

FOLDER = REPO / "examples" / "wrap_existing"
MOST_LINES = 6


def lines_of(name: str) -> list[str]:
    return (FOLDER / name).read_text().splitlines()


Script = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Script:
    """Runs a script elsewhere than in the repository, where what it writes lands.

    Gives what it prints and what it has made.
    """
    monkeypatch.chdir(tmp_path)

    def script(file: Path, **env: str) -> tuple[str, dict[str, Any]]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        made = runpy.run_path(str(file), run_name="__main__")
        return capsys.readouterr().out, made

    return script


def test_training_it_takes_at_most_six_lines() -> None:
    matcher = difflib.SequenceMatcher(None, lines_of("before.py"), lines_of("after.py"), False)
    opcodes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    changed = sum(max(old_end - old, new_end - new) for _, old, old_end, new, new_end in opcodes)
    assert 0 < changed <= MOST_LINES
    assert max(map(len, lines_of("after.py"))) <= 100, "the lines are lines"


@pytest.mark.slow
def test_the_original_runs_as_it_stands(art_server: LiveServer, run: Script) -> None:
    """On a server of OpenAI's dialect that has a model of the name that the example calls."""
    with ArtClient(art_server.base_url) as client:
        client.create_policy("gpt-4.1-mini")
        before = client.status().calls
        env = {"OPENAI_API_KEY": "sk-none", "OPENAI_BASE_URL": art_server.base_url}
        said, made = run(FOLDER / "before.py", **env)
        assert said.count("(it is ") == 5
        assert [*made["graph"].get_graph().nodes] == ["__start__", "chatbot", "tools", "__end__"]
        assert client.status().calls >= before + 5, "the answers came from there"


@pytest.mark.slow
def test_it_learns(art_server: LiveServer, tmp_path: Path, run: Script) -> None:
    # That the reward rises is shown by `test_email_example.py`; here that the six lines train.
    # Six groups of eight do: a sixth of the first groups are all right or all wrong, so that a step
    # without any to learn from is one in 40,000.
    source = (FOLDER / "after.py").read_text()
    for long, short in (
        ("steps=60", "steps=1"),
        ('"test", 100', '"test", 2'),
        ("Trainer(llm)", "Trainer(llm, groups_per_step=6)"),
    ):
        assert source.count(long) == 1
        source = source.replace(long, short)
    (tmp_path / "after.py").write_text(source)
    said, _ = run(tmp_path / "after.py", ART_BASE_URL=art_server.base_url)
    assert said.count("(it is ") == 5, "the agent still does what it did"
    results = [step["inbox-agent"] for step in steps_of(tmp_path / "out" / "train")]
    assert [result["version"] for result in results] == [1]
    assert all(result["nodes"]["chatbot"]["tokens"] > 0 for result in results)
