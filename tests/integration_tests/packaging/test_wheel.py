"""The wheel in an empty environment: the client installs and imports without torch or a server."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_client_alone(tmp_path: Path) -> None:
    def run(*argv: str | Path) -> str:
        done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, REPO)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "langchain_art/py.typed" in names
    assert "langchain_art_server/__main__.py" in names
    assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/"))]
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel)
    installed = {p["name"] for p in json.loads(run(python, "-m", "pip", "list", "--format=json"))}
    assert installed.isdisjoint({"torch", "transformers", "peft", "litellm", "langfuse", "fastapi"})
    run(python, "-c", "from langchain_art import ChatART, Trainer, capture; ChatART(model='m')")
    assert "serve" in run(tmp_path / "venv" / "bin" / "langchain-art", "--help")
    refused = subprocess.run(
        [tmp_path / "venv" / "bin" / "langchain-art", "serve", "m"], capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert "langchain-art[local]" in refused.stderr
