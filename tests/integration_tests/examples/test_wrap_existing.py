"""The example of an agent that was written for a hosted model: as it was, and trained."""

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from langchain_art import ArtClient
from tests.support.examples import steps_of
from tests.support.live_server import REPO, LiveServer

FOLDER = REPO / "examples" / "wrap_existing"
MOST_LINES = 6


def lines_of(name: str) -> list[str]:
    return (FOLDER / name).read_text().splitlines()


def run_in(folder: Path, *arguments: str, **env: str) -> str:
    """Run Python elsewhere than in the repository: what the example writes lands there."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'server'}"} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_training_it_takes_at_most_six_lines() -> None:
    matcher = difflib.SequenceMatcher(None, lines_of("before.py"), lines_of("after.py"), False)
    opcodes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    changed = sum(max(old_end - old, new_end - new) for _, old, old_end, new, new_end in opcodes)
    assert 0 < changed <= MOST_LINES
    assert max(map(len, lines_of("after.py"))) <= 100, "the lines are lines"


@pytest.mark.slow
def test_the_original_runs_as_it_stands(art_server: LiveServer, tmp_path: Path) -> None:
    """On a server of OpenAI's dialect that has a model of the name that the example calls."""
    with ArtClient(art_server.base_url) as client:
        client.create_policy("gpt-4.1-mini")
        before = client.status().calls
        env = {"OPENAI_API_KEY": "sk-none", "OPENAI_BASE_URL": art_server.base_url}
        run = "made = runpy.run_module('examples.wrap_existing.before', run_name='__main__')"
        show = f"import runpy; {run}; print(*made['graph'].get_graph().nodes)"
        said = run_in(tmp_path, "-c", show, **env)
        assert said.count("(it is ") == 5
        assert said.splitlines()[-1] == "__start__ chatbot tools __end__"
        assert client.status().calls >= before + 5, "the answers came from there"


@pytest.mark.slow
def test_it_learns(art_server: LiveServer, tmp_path: Path) -> None:
    # That the reward rises is shown by the other example's tests; here that the six lines train.
    # Six groups of eight do: a sixth of the first groups are all right or all wrong, so that a step
    # without any to learn from is one in 40,000.
    source = (FOLDER / "after.py").read_text()
    for long, short in (
        ("steps=60", "steps=2"),
        ('"test", 100', '"test", 10'),
        ("Trainer(llm)", "Trainer(llm, groups_per_step=6)"),
    ):
        assert source.count(long) == 1
        source = source.replace(long, short)
    (tmp_path / "after.py").write_text(source)
    said = run_in(tmp_path, "after.py", ART_BASE_URL=art_server.base_url)
    assert said.count("(it is ") == 5, "the agent still does what it did"
    results = [step["inbox-agent"] for step in steps_of(tmp_path / "out" / "train")]
    assert [result["version"] for result in results] == [1, 2]
    assert all(result["nodes"]["chatbot"]["tokens"] > 0 for result in results)
