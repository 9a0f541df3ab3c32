"""A small disk that fills up under a real server, and is emptied again."""

import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from langchain_art_server import backups
from tests.support.live_server import HastyServer
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.steps_of_a_fit import ended
from tests.support.stored_step import RATE

SIZE, FLOOR = 96 << 20, 24 << 20
CYCLES = count(1, 30)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of `SIZE` bytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk here: needs root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path, left: int) -> None:
    """Leave so many bytes free."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with (disk / "ballast").open("ab", buffering=0) as file, suppress(OSError):
        for _ in range(max(0, free - left) // 4096):
            file.write(bytes(4096))


class Client:
    """Does what clients do, and remembers what was acknowledged and how it was answered."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.runs: list[str] = []
        self.jobs: list[dict[str, Any]] = []
        self._made = 0

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        answer = self.http.request(method, path, json=body, headers=headers)
        assert answer.status_code in (200, 202, 404, 503), answer.text
        if answer.status_code == 503 and path != "/readyz":
            error = answer.json()["error"]
            assert int(answer.headers["retry-after"]) > 0 and error["code"] == "engine_unavailable"
            assert "disk" in error["message"], error
        return answer

    def run_once(self) -> str | None:
        """A run of one call, with a reward; its id if it was acknowledged."""
        self._made += 1
        name = f"run-{self._made}"
        body = {"model": "tiny", "messages": [{"role": "user", "content": "When?"}]}
        body |= {"max_tokens": 4, "seed": self._made, "art": {"trajectory_id": name}}
        if self.ask("POST", "/v1/chat/completions", body).status_code != 200:
            return None
        reward = {"reward": float(self._made % 2)}
        if self.ask("PUT", f"/v1/trajectories/{name}/reward", reward).status_code != 200:
            return None
        self.runs.append(name)
        return name

    def train(self, key: str, runs: list[str]) -> bool:
        body = {"policy": "tiny", "groups": [runs], "config": {"learning_rate": RATE}}
        answer = self.ask("POST", "/v1/train", body, **{"Idempotency-Key": key})
        if answer.status_code == 202:
            self.jobs.append({"key": key, "runs": runs, **answer.json()})
        return answer.status_code == 202

    def reads(self) -> None:
        """What only reads is answered."""
        version = self.ask("GET", "/v1/policies/tiny").json()["version"]
        paths = ["/status", "/v1/jobs", "/v1/models", "/v1/trajectories?limit=3"]
        paths += [f"/v1/trajectories/{self.runs[-1]}", "/v1/policies/tiny/checkpoints"]
        for path in [*paths, f"/v1/policies/tiny/checkpoints/{version}/adapter"]:
            assert self.ask("GET", path).status_code == 200, path

    def becomes_ready(self, status: int) -> httpx.Response:
        deadline = time.monotonic() + 60
        while (answer := self.ask("GET", "/readyz")).status_code != status:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.1)
        return answer


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(count(600, 7200))
def test_a_full_disk_is_told_refused_and_survived(disk: Path) -> None:
    with HastyServer(disk / "data", settings=f"min_free_bytes = {FLOOR}\n") as server:
        draw = random.Random(drawn_seed())
        with server.http() as http:
            client = Client(http)
            for cycle in range(CYCLES):
                a_cycle(client, disk, cycle, draw)
        assert "bytes free. With fewer than" in " ".join(server.log.read_text().split())
        server.kill()
        server.start()
        with server.http() as http:
            for run in client.runs:
                found = http.get(f"/v1/trajectories/{run}")
                assert found.status_code == 200 and found.json()["reward"] is not None, run
            states = {job["id"]: job["state"] for job in http.get("/v1/jobs").json()["data"]}
            assert {job["id"] for job in client.jobs} == set(states)
            assert set(states.values()) == {"succeeded"}


def a_cycle(client: Client, disk: Path, cycle: int, draw: random.Random) -> None:
    runs = [run for _ in range(4) if (run := client.run_once())]
    assert len(runs) == 4 and client.train(f"before-{cycle}", runs)
    time.sleep(draw.uniform(0.0, 0.5))  # the step may be anywhere
    left = draw.choice([0, 4096, FLOOR // 2])
    fill(disk, left)
    for _ in range(10):  # the server has not looked at the disk yet
        client.run_once()
    client.reads()
    told = client.becomes_ready(503)
    assert "bytes free, expected at least" in told.json()["reasons"]["disk"]
    refused = client.ask("POST", "/v1/trajectories", {"id": f"t-{cycle}"})
    assert refused.status_code == 503 and "min_free_bytes" in refused.text
    assert client.run_once() is None
    assert not client.train(f"full-{cycle}", runs)
    assert client.ask("POST", "/v1/policies", {"name": "other"}).status_code == 503
    status = client.ask("GET", "/status").json()
    assert status["free_bytes"] < status["min_free_bytes"] == FLOOR and not status["ready"]
    client.reads()
    (disk / "ballast").unlink()
    client.becomes_ready(200)
    more = [run for _ in range(4) if (run := client.run_once())]
    assert len(more) == 4 and client.train(f"after-{cycle}", more)
    for job in client.jobs[-2:]:
        found = ended(client.http, job)
        if found["state"] == "failed":
            assert found["retryable"], found
            assert client.train(job["key"], job["runs"])
            found = ended(client.http, job)
        assert found["state"] == "succeeded", found


def test_a_backup_that_has_no_space_is_refused_in_words(disk: Path, data: Path) -> None:
    fill(disk, 1 << 18)
    done = CliRunner().invoke(backups.cli, ["backup", str(data), str(disk / "copy")])
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.exception
    assert "No space left on device" in done.output or "disk is full" in done.output
    assert [one.name for one in disk.iterdir()] == ["ballast"]
