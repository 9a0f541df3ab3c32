"""One seed, one result, to the bit: through sampling, jobs, kills and restarts, on CPU in float32.

Calls go out one after the other. Where many are decoded at once, who shares a batch with whom is a
matter of arrival, and rounding follows it; seeds cannot help there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from langchain_art import ArtClient
from tests.support.engines import engines
from tests.support.live_server import LiveServer
from tests.support.soak import count

STEPS = count(8, 20)
#: Step -> which process is killed with -9 in it. The engines are the server's children, in order.
#: Each kind once by default: that a server survives its own restarts, `test_crashes` shows.
KILLS = {2: "sampler", 4: "server", 6: "learner", 10: "server"}
#: Those that are preference steps: each run of the first group is preferred to each of the second.
PREFERS = {10}
FILES = ("adapter_model.safetensors", "optimizer.safetensors")


def serve(folder: Path, name: str) -> LiveServer:
    settings = folder / "keep.toml"
    settings.write_text("keep_checkpoints = 100\n")
    return LiveServer(folder / name, "--config", str(settings)).start()


def rollouts(
    http: httpx.Client, policy: str, step: int, seed: int
) -> tuple[list[list[str]], list[list[int]]]:
    """Two groups of runs with arbitrary rewards, which no policy exhausts; and what was said."""
    runs: list[str] = []
    said: list[list[int]] = []
    for index in range(8):
        run = f"{policy}-{step}-{index}"
        body: dict[str, Any] = {
            "model": policy,
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


def train(
    server: LiveServer, policy: str, step: int, groups: list[list[str]], kill: str | None
) -> None:
    """Take a step; with `kill`, a process dies in the middle of it and is started again."""
    # Where it is to be killed, the step takes long enough for that, killed or not.
    config: dict[str, Any] = {"learning_rate": 5e-4}
    if KILLS.get(step) in ("server", "learner"):
        config |= {"optimizer_steps": 8, "tokens_per_microbatch": 64}
    if step in PREFERS:
        config = {"kind": "dpo", "learning_rate": 5e-4, "tokens_per_microbatch": 64}
        groups = [[chosen, rejected] for chosen in groups[0] for rejected in groups[1]]
    body = {"policy": policy, "groups": groups, "config": config}
    key = {"Idempotency-Key": f"{policy}-{step}"}
    with server.http() as http:
        job = f"/v1/jobs/{http.post('/v1/train', json=body, headers=key).json()['id']}"
        heard: list[dict[str, Any]] = []
        # That a step begins is said before the learner has it; it has once the step advances.
        least = 0.0 if kill == "sampler" else 1e-9
        while kill and not any((event["progress"] or 0.0) >= least for event in heard):
            where = {"wait": 5, "after": heard[-1]["seq"] if heard else 0}
            heard += http.get(f"{job}/events", params=where).json()["data"]
    if kill == "server":
        server.kill()
        assert not (server.data_dir / "adapters" / policy / str(step)).exists()
        server.start()
    elif kill == "learner":
        os.kill(engines(server)[-1], signal.SIGKILL)
    with server.http() as http:
        while (found := http.get(job, params={"wait": 10}).json())["state"] in (
            "queued",
            "running",
        ):
            pass
    assert found["state"] == "succeeded", found
    assert found["result"]["version"] == step
    if kill == "learner":
        assert f"The learner died in step {step}; the step starts again." in server.log.read_text()


def fit(
    server: LiveServer, policy: str, steps: int, seed: int, kills: dict[int, str]
) -> list[list[list[int]]]:
    """Some steps of the toy task; what was sampled in each."""
    said: list[list[list[int]]] = []
    for step in range(1, steps + 1):
        with server.http() as http:
            groups, tokens = rollouts(http, policy, step, seed)
        said.append(tokens)
        if kills.get(step) == "sampler":  # the next step's calls are drawn by a new process
            os.kill(engines(server)[0], signal.SIGKILL)
        train(server, policy, step, groups, kills.get(step))
    return said


def versions(server: LiveServer, policy: str, steps: int) -> list[tuple[bytes, ...]]:
    """Adapter and optimizer of every version."""
    folder = server.data_dir / "adapters" / policy
    return [
        tuple((folder / str(step) / name).read_bytes() for name in FILES)
        for step in range(1, steps + 1)
    ]


@dataclass(frozen=True)
class Calm:
    """The undisturbed run: its server, what was sampled, and the versions."""

    server: LiveServer
    said: list[list[list[int]]]
    versions: list[tuple[bytes, ...]]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calm]:
    server = serve(tmp_path_factory.mktemp("calm"), "data")
    said = fit(server, "tiny", STEPS, seed=0, kills={})
    yield Calm(server, said, versions(server, "tiny", STEPS))
    server.stop()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steps_with_kills_end_bit_for_bit_as_the_undisturbed_run(
    calm: Calm, tmp_path: Path
) -> None:
    """Two servers, one seed, and steps that are begun again."""
    stormy = serve(tmp_path, "stormy")
    before = stormy.process
    said = fit(stormy, "tiny", STEPS, seed=0, kills=KILLS)
    assert stormy.process is not before
    stormy.stop()
    assert said == calm.said
    for step, (one, other) in enumerate(
        zip(calm.versions, versions(stormy, "tiny", STEPS), strict=True), start=1
    ):
        assert one == other, f"version {step} differs"
    assert len({adapter for adapter, _ in calm.versions}) == STEPS  # each step did something


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_seed_gives_one_adapter_and_another_seed_another(calm: Calm) -> None:
    """Also on a server that has trained before: what other policies did leaves no trace."""
    for seed in (0, 5000):
        policy = f"seed-{seed}"
        with ArtClient(calm.server.base_url) as client:
            client.create_policy(policy)
        said = fit(calm.server, policy, 3, seed, kills={})
        assert (said == calm.said[:3]) == (seed == 0)
        assert (versions(calm.server, policy, 3) == calm.versions[:3]) == (seed == 0)
