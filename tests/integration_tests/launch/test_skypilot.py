"""SkyPilot reads our file and our arguments. `make test-launch`: it installs 330 MB for it.

Its API server is not started: that listens on one port for all, and might be a developer's own.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import skypilot_python
from tests.support.live_server import REPO

pytestmark = [pytest.mark.skypilot, pytest.mark.slow]
KEY = "key-of-the-test"
YAML = "server/deploy/skypilot.yaml"
PARSER = Path(__file__).with_name("sky_task.py")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    more = {"HOME": str(tmp_path), "ART_API_KEY": KEY, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    return os.environ | more


def parsed(env: dict[str, str], argv: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [skypilot_python(), PARSER, *argv], env=env, cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_plain_sky_takes_the_file(env: dict[str, str]) -> None:
    argv = ["launch", "-c", "mine", "-d", "--secret", "ART_API_KEY", YAML]
    found = parsed(env, argv)
    assert found["accelerators"] == {"H100": 1}
    assert found["ports"] == ["8000"] and found["workdir"] == "."
    assert (found["idle_minutes"], found["down"]) == (15, True)
    assert found["asks"], "SkyPilot shows the price and asks"
    assert found["secrets"] == {"ART_API_KEY": KEY}
    assert found["envs"]["MODEL"] == "Qwen/Qwen3-8B"
    assert "requirements/gpu.txt" in found["setup"] and "langchain_art_server" in found["run"]


@pytest.mark.parametrize(
    ("argv", "read"),
    [
        (["status", "--endpoint", "8000", "mine"], {"endpoint": "8000"}),
        (["autostop", "mine", "-i", "15", "--yes"], {"idle_minutes": "15", "yes": "True"}),
        (["down", "mine", "--yes"], {"yes": "True"}),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_it_has_the_other_commands(
    env: dict[str, str], argv: list[str], read: dict[str, str]
) -> None:
    found = parsed(env, argv)
    assert found["clusters"] == "('mine',)" and read.items() <= found.items()
