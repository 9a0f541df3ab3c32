"""One seed, one result, to the bit: through sampling, jobs, kills and restarts, on CPU in float32.

Calls go out one after the other. Where many are decoded at once, who shares a batch with whom is a
matter of arrival, and rounding follows it; seeds cannot help there.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engines import engines
from tests.support.live_server import LiveServer
from tests.support.soak import count

STEPS = count(12, 20)
#: Step -> which process is killed with -9 in it. The engines are the server's children, in order.
KILLS = {3: "sampler", 5: "server", 8: "learner", 10: "server"}
FILES = ("adapter_model.safetensors", "optimizer.safetensors")


def serve(folder: Path, name: str) -> LiveServer:
    settings = folder / "keep.toml"
    settings.write_text("keep_checkpoints = 100\n")
    return LiveServer(folder / name, "--config", str(settings)).start()


def rollouts(http: httpx.Client, step: int, seed: int) -> tuple[list[list[str]], list[list[int]]]:
    """Two groups of runs with arbitrary rewards, which no policy exhausts; and what was said."""
    runs: list[str] = []
    said: list[list[int]] = []
    for index in range(8):
        run = f"s{step}-{index}"
        body: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"When is the audit? {index // 4}"}],
            "max_tokens": 24,
            "temperature": 1.3,
            "seed": seed + 100 * step + index,
            "art": {"trajectory_id": run},
        }
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        said.append(http.get(f"/v1/calls/{answer.json()['id']}").json()["token_ids"])
        reward = {"reward": float(sum(said[-1]) % 7)}
        assert http.put(f"/v1/trajectories/{run}/reward", json=reward).status_code == 200
        runs.append(run)
    return [runs[:4], runs[4:]], said


def train(server: LiveServer, step: int, groups: list[list[str]], kill: str | None) -> None:
    """Take a step; with `kill`, a process dies in the middle of it and is started again."""
    # Where something is to be killed, the step takes long enough for that, killed or not.
    config = {"learning_rate": 5e-4, "optimizer_steps": 16 if step in KILLS else 1}
    body = {"policy": "tiny", "groups": groups, "config": config}
    with server.http() as http:
        job = http.post("/v1/train", json=body, headers={"Idempotency-Key": f"k-{step}"}).json()
        while kill and "training" not in http.get(f"/v1/jobs/{job['id']}/events").text:
            time.sleep(0.005)
    if kill == "server":
        server.kill()
        server.start()
    elif kill == "learner":
        os.kill(engines(server)[-1], signal.SIGKILL)
    with server.http() as http:
        while (found := http.get(f"/v1/jobs/{job['id']}", params={"wait": 10}).json())["state"] in (
            "queued",
            "running",
        ):
            pass
    assert found["state"] == "succeeded", found
    assert found["result"]["version"] == step


def fit(server: LiveServer, steps: int, seed: int, kills: dict[int, str]) -> list[list[list[int]]]:
    """Some steps of the toy task; what was sampled in each."""
    said: list[list[list[int]]] = []
    for step in range(1, steps + 1):
        with server.http() as http:
            groups, tokens = rollouts(http, step, seed)
        said.append(tokens)
        if kills.get(step) == "sampler":  # the next step's calls are drawn by a new process
            os.kill(engines(server)[0], signal.SIGKILL)
        train(server, step, groups, kills.get(step))
    return said


def versions(server: LiveServer, steps: int) -> list[tuple[bytes, ...]]:
    """Adapter and optimizer of every version."""
    folder = server.data_dir / "adapters" / "tiny"
    return [
        tuple((folder / str(step) / name).read_bytes() for name in FILES)
        for step in range(1, steps + 1)
    ]


Told = tuple[list[list[list[int]]], list[tuple[bytes, ...]]]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The undisturbed run: what was sampled, and the versions."""
    server = serve(tmp_path_factory.mktemp("calm"), "data")
    said = fit(server, STEPS, seed=0, kills={})
    server.stop()
    return said, versions(server, STEPS)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steps_with_four_kills_end_bit_for_bit_as_the_undisturbed_run(
    calm: Told, tmp_path: Path
) -> None:
    stormy = serve(tmp_path, "stormy")
    before = stormy.process
    said = fit(stormy, STEPS, seed=0, kills=KILLS)
    assert stormy.process is not before
    stormy.stop()
    assert said == calm[0]
    for step, (one, other) in enumerate(
        zip(calm[1], versions(stormy, STEPS), strict=True), start=1
    ):
        assert one == other, f"version {step} differs"
    assert len({adapter for adapter, _ in calm[1]}) == STEPS  # each step did something


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_seed_gives_one_adapter_and_another_seed_another(calm: Told, tmp_path: Path) -> None:
    for seed in (0, 5000):
        server = serve(tmp_path, f"seed-{seed}")
        said = fit(server, 3, seed, kills={})
        server.stop()
        assert (said == calm[0][:3]) == (seed == 0)
        assert (versions(server, 3) == calm[1][:3]) == (seed == 0)
