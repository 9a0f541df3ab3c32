"""What `server/deploy/skypilot.yaml` runs on the machine, run here with a small model."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml

from langchain_art.wire.api_keys import new_api_key
from langchain_art_server.config import VllmSettings, load_settings
from tests.support.live_server import REPO, await_answer, free_port, small_model

PORT = 8000
TASK: dict[str, Any] = yaml.safe_load((REPO / "server/deploy/skypilot.yaml").read_text())


def test_what_it_names_is_there() -> None:
    settings = load_settings(REPO / TASK["envs"]["SETTINGS"], model=TASK["envs"]["MODEL"])
    assert isinstance(settings.sampler, VllmSettings)
    assert TASK["resources"]["ports"] == PORT
    assert f"--port {PORT}" in TASK["run"]
    for file in ("requirements/gpu.txt", "requirements/build.txt"):
        assert file in TASK["setup"] and (REPO / file).is_file()
    for section in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=TASK[section], text=True, check=True)
    made_for = re.search(r"CPython (3\.\d+)", (REPO / "requirements/gpu.txt").read_text())
    assert made_for is not None and f"--python {made_for[1]} " in TASK["setup"]


def test_it_serves_with_the_key_and_ends_when_nobody_calls(tmp_path: Path) -> None:
    (tmp_path / "art/bin").mkdir(parents=True)
    python = tmp_path / "art/bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    settings = tmp_path / "cpu.toml"
    settings.write_text("")
    key, port = new_api_key(), free_port()
    # Of the script, only where it listens differs: the tests' machine has one loopback for all.
    script = TASK["run"].replace("--host 0.0.0.0", "--host 127.0.0.1")
    script = script.replace(f"--port {PORT}", f"--port {port}")
    given = {"MODEL": str(small_model()), "SETTINGS": str(settings), "POLICIES": "writer critic"}
    given |= {"HOME": str(tmp_path), "ART_API_KEY": key, "IDLE_MINUTES": "60"}
    env = os.environ | TASK["envs"] | given
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script], env=env, cwd=REPO, stdout=log, stderr=log
        )
    try:
        await_answer(f"http://127.0.0.1:{port}/readyz", process, tmp_path / "log", 120)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            assert http.get("/v1/policies").status_code == 401
            bearer = {"Authorization": f"Bearer {key}"}
            policies = http.get("/v1/policies", headers=bearer).json()["data"]
        assert {one["name"] for one in policies} == {"writer", "critic"}
        assert (tmp_path / "art-data" / "art.sqlite3").is_file()
        check_that_it_keeps_to_itself(process.pid, key, tmp_path / "art-data")
        process.send_signal(signal.SIGTERM)  # reaches the server: the shell has become it
        assert process.wait(60) == 0
    finally:
        process.kill()


def check_that_it_keeps_to_itself(pid: int, key: str, data: Path) -> None:
    """No engine is told the key, and nobody else reads the data."""
    children = descendants(pid)
    assert len(children) >= 2  # sampler and learner
    for child in children:
        assert key not in Path(f"/proc/{child}/environ").read_text()
        assert key not in Path(f"/proc/{child}/cmdline").read_text()
    kept = [data, *data.rglob("*")]
    assert len([path for path in kept if path.is_file()]) > 3
    for path in kept:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, children) for one in (child, *descendants(child))]
