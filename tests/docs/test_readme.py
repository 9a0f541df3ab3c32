"""The README's loop runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.live_server import LiveServer

REPO = Path(__file__).parents[2]
README = (REPO / "README.md").read_text()


def test_the_loop_runs(
    art_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    loop = next(block for block in blocks if "Trainer(" in block)
    monkeypatch.setenv("ART_BASE_URL", art_server.base_url)
    done = subprocess.run(
        [sys.executable, "-c", loop], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"my-agent@\d+", done.stdout.splitlines()[-1])
