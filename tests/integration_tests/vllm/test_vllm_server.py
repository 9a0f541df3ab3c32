"""vLLM samples and PEFT learns behind the real server: the demo's agent, swaps, and kills.

``make soak`` kills twenty times; ``-o log_cli=true`` shows how long the engine was away.
"""

import asyncio
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.email_search.train import make_rollout
from langchain_art import ChatART, TrainConfig, Trainer
from tests.support.live_server import LiveServer
from tests.support.mails import check_exact_runs, mails_of
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.vllm_engine import (
    command,
    gone,
    guard_of,
    shared_memory,
    vllm_of,
    vllm_toml,
    wide_model,
)

log = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(3600),
    pytest.mark.xdist_group("vllm-server"),
]
KILLS = count(1, 20)
VERSIONS = 7


class VllmServer(LiveServer):
    """The server with vLLM, as a user starts it."""

    def __init__(self, folder: Path) -> None:
        toml = vllm_toml(folder / "art.toml", keep_checkpoints=VERSIONS)
        model = wide_model(folder / "model")
        super().__init__(folder / "data", "--config", str(toml), model=model)

    def held(self) -> list[int]:
        """Process ids of the guard and of vLLM."""
        assert self.process is not None
        return [guard_of(self.process.pid), *vllm_of(self.process.pid)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    made = VllmServer(tmp_path_factory.mktemp("vllm-server")).start(timeout=600)
    yield made
    held = made.held()
    made.kill()  # kill -9: nothing of ours is left to clean up
    assert gone(held)


async def test_the_demos_agent_is_captured_and_trained_exactly(
    server: VllmServer, tmp_path: Path
) -> None:
    with server.http() as http:
        assert http.get("/status").json()["sampler"] == "VllmSampler"
    await check_exact_runs(server, tmp_path)


class Killer(threading.Thread):
    """Kills one of vLLM's processes, or the one that holds it, while calls run; waits; again.

    Not the one that Python's multiprocessing has for cleaning up at the end: nothing needs it.
    """

    def __init__(self, server: VllmServer, seed: int) -> None:
        super().__init__(daemon=True)
        self.server, self.back = server, list[float]()
        self.folders = set[Path]()
        self.shared = set[Path]()
        self.random = random.Random(seed)

    def run(self) -> None:
        with self.server.http() as http:
            while len(self.back) < KILLS:
                time.sleep(self.random.uniform(0.5, 3.0))
                if http.get("/status").json()["running_calls"] == 0:
                    continue
                restarts = http.get("/status").json()["engine_restarts"]
                self.folders.add(Path(command(self.server.held()[0])[3]))
                needed = [
                    pid
                    for pid in self.server.held()
                    if not any("resource_tracker" in part for part in command(pid))
                ]
                self.shared |= shared_memory(needed)
                os.kill(self.random.choice(needed), signal.SIGKILL)
                begun = time.monotonic()
                while http.get("/status").json()["engine_restarts"] == restarts:
                    time.sleep(0.05)
                body = {"model": "tiny", "messages": [{"role": "user", "content": "?"}]}
                body |= {"max_tokens": 1}
                answer = http.post("/v1/chat/completions", json=body, timeout=900)
                assert answer.status_code == 200, answer.text
                self.back.append(time.monotonic() - begun)
                log.warning("kill %d: back after %.1f s", len(self.back), self.back[-1])


@pytest.mark.soak
def test_vllm_is_killed_while_agents_run(server: VllmServer, tmp_path: Path) -> None:
    """The agents go on, the engine is back by itself, and only whole calls are trained."""
    mails = mails_of(tmp_path, 64, 2)
    model = ChatART(model="tiny", base_url=server.base_url, max_tokens=48, timeout=900)
    trainer = Trainer(
        model,
        group_size=4,
        groups_per_step=4,
        concurrency=16,
        config=TrainConfig(learning_rate=1e-4),
        out_dir=tmp_path / "fit",
    )
    killer = Killer(server, drawn_seed())
    killer.start()
    steps = 0
    rollout = make_rollout(model, mails)
    while killer.is_alive() or steps == 0:
        steps += 1
        result = asyncio.run(trainer.fit(rollout, mails.scenarios("train"), steps=steps))
    mails.close()
    assert len(killer.back) == KILLS
    back = [f"{seconds:.1f}" for seconds in killer.back]
    log.warning("%d kills, %d steps; back after %s s", KILLS, steps, back)
    assert sum(folder.exists() for folder in killer.folders) <= 1, "copies of adapters are left"
    assert killer.shared and not any(path.exists() for path in killer.shared)
    assert len(result.history) == steps
    with server.http() as http:
        jobs = http.get("/v1/jobs", params={"policy": "tiny"}).json()["data"]
    assert len(jobs) >= steps
    for job in jobs:
        assert job["state"] == "succeeded", job
        assert job["result"]["metrics"].get("logprob_gap_mean", 0.0) <= 1e-4
