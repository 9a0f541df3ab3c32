"""The wheel in an empty environment: the client installs and imports without torch or a server."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.environments import UV, share_bytecode, uv_environment
from tests.support.live_server import REPO


@pytest.mark.slow
def test_the_client_alone(tmp_path: Path) -> None:
    def run(*argv: str | Path) -> str:
        done = subprocess.run(
            argv, capture_output=True, text=True, cwd=tmp_path, env=uv_environment()
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run(UV, "build", "--wheel", "--python", sys.executable, "--out-dir", tmp_path, REPO)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "langchain_art/py.typed" in names
    [sbom] = [one for one in names if ".dist-info/sboms/" in one]
    written = (REPO / "requirements/langchain-art.cdx.json").read_bytes()
    assert zipfile.ZipFile(wheel).read(sbom) == written
    assert "langchain_art_server/__main__.py" in names
    assert "langchain_art_server/page/static/vendor/uplot.js" in names
    assert "langchain_art/_examples/examples/tic_tac_toe/train.py" in names
    assert not [name for name in names if name.endswith(".safetensors") or "/test_" in name]
    rooms = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert rooms == {"langchain_art", "langchain_art_server"}
    run(UV, "venv", "--python", sys.executable, tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(UV, "pip", "install", "--python", python, wheel)
    share_bytecode(tmp_path / "venv")
    listed = json.loads(run(UV, "pip", "list", "--python", python, "--format=json"))
    installed = {package["name"] for package in listed}
    assert {"langchain-art", "langgraph"} <= installed
    assert installed.isdisjoint({"torch", "transformers", "peft", "litellm", "langfuse", "fastapi"})
    use = "from langchain_art import ChatART, Trainer, capture; ChatART(model='m'); "
    new = f"app(['new', '{tmp_path / 'my-agent'}', '--from', 'tic-tac-toe'])"
    run(python, "-c", f"{use}from langchain_art.cli.main import app; {new}")
    assert (tmp_path / "my-agent" / "my_agent" / "build_base_model.py").is_file()
    assert (tmp_path / "my-agent" / "tests" / "test_fit.py").is_file()
    refused = subprocess.run(
        [tmp_path / "venv" / "bin" / "langchain-art", "serve", "m"], capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert "langchain-art[local]" in refused.stderr
