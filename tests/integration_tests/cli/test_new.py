"""`langchain-art new`: an example as a project of its own, whose tests pass where it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from langchain_art.cli.gallery.new import make_project
from langchain_art.errors import ConfigError
from tests.support.live_server import REPO

EXAMPLES = sorted(
    path.parents[1].name for path in (REPO / "examples").glob("*/base_model/config.json")
)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_each_example_is_a_project_whose_tests_pass(example: str, tmp_path: Path) -> None:
    home = tmp_path / "my-agent"
    assert make_project(home, example.replace("_", "-")) == "my_agent"
    texts = [path.read_text() for path in home.rglob("*.py")]
    assert not [text for text in texts if re.search(r"^(from|import) examples\b", text, re.M)]
    project = tomllib.loads((home / "pyproject.toml").read_text())["project"]
    assert project["name"] == "my-agent"
    for path in (home / "my_agent" / "base_model").rglob("*"):
        assert path.stat().st_size <= 1_000_000
    # Neither the repository's own `examples` nor `tests` may be what the project finds.
    package = REPO / "langchain_art"
    (tmp_path / "site").mkdir()
    for folder in (package, REPO / "server" / "langchain_art_server"):
        (tmp_path / "site" / folder.name).symlink_to(folder)
    done = subprocess.run(
        # The tests of its environment are imported here, and run where they come from.
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "short_fit"],
        cwd=home,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "1 passed" in done.stdout and "error" not in done.stdout


@pytest.mark.parametrize(
    ("directory", "example", "words"),
    [
        ("my-agent", "chess", "expected one of: "),
        ("3d", "email-search", "a letter first"),
        ("class", "email-search", "no word of Python"),
        ("langchain-art", "email-search", "is taken"),
        ("full", "email-search", "expected a new directory"),
    ],
)
def test_what_is_no_project_is_refused(
    directory: str, example: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match=words):
        make_project(tmp_path / directory, example)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
