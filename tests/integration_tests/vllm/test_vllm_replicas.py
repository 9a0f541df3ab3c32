"""Two vLLMs behind the real server: the demo's agent learns, and goes on when one is killed.

``make soak`` kills a single one twenty times; ``-o log_cli=true`` shows how long it was away.
"""

import asyncio
import logging
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.email_search.train import make_rollout
from langchain_art import ChatART, TrainConfig, Trainer
from tests.support.hot_swap import check_versions
from tests.support.live_server import LiveServer
from tests.support.mails import mails_of
from tests.support.seeds import drawn_seed
from tests.support.soak import count, in_soak
from tests.support.vllm_engine import (
    children,
    command,
    gone,
    guards_of,
    shared_memory,
    vllm_toml,
    wide_model,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("vllm-replicas"),
]
STEPS = 2
KILLS = count(1, 20)  # in `make soak` alone; 1 is the least of a share of it
log = logging.getLogger(__name__)


class VllmServer(LiveServer):
    """The server with vLLMs, as a user starts it."""

    def __init__(self, folder: Path, replicas: int, kept: int) -> None:
        toml = vllm_toml(folder / "art.toml", {"replicas": replicas}, keep_checkpoints=kept)
        model = wide_model(folder / "model")
        super().__init__(folder / "data", "--config", str(toml), model=model)

    def guards(self) -> list[int]:
        assert self.process is not None
        return guards_of(self.process.pid)

    def held(self) -> list[int]:
        """Process ids of the guards and of vLLM."""
        return [pid for guard in self.guards() for pid in [guard, *children(guard)]]

    def answered(self) -> list[int]:
        """The completions of each vLLM, by its own account."""
        found: list[int] = []
        for guard in self.guards():
            socket = Path(command(guard)[3]) / "vllm.sock"
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://vllm"
            ) as vllm:
                text = vllm.get("/metrics").text
            counts = re.findall(r"^vllm:request_success_total{.*} (\S+)$", text, re.MULTILINE)
            found.append(int(sum(map(float, counts))))
        return found


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VllmServer]:
    """With as many vLLMs, and checkpoints that are kept, as the test says."""
    made = VllmServer(tmp_path, *request.param).start(timeout=900)
    yield made
    held = made.held()
    made.kill()  # kill -9: nothing of ours is left to clean up
    assert gone(held)


class Killer(threading.Thread):
    """Kills the engine of one vLLM when both have calls and a version was published."""

    def __init__(self, server: VllmServer) -> None:
        super().__init__(daemon=True)
        self.server, self.calls = server, list[int]()
        self.seen = set[str]()

    def run(self) -> None:
        with self.server.http() as http:
            while not self.calls:
                time.sleep(0.01)
                now = http.get("/status").json()
                calls = [one["running_calls"] for one in now["replicas"]]
                if now["policies"][0]["version"] >= 1 and min(calls) >= 1:
                    os.kill(children(self.server.guards()[-1])[-1], signal.SIGKILL)
                    self.calls = calls
            while not self.back(http.get("/status").json()):
                assert http.get("/readyz").status_code == 200
                time.sleep(0.05)

    def back(self, status: dict[str, Any]) -> bool:
        self.seen |= {one["problem"] for one in status["replicas"] if one["problem"]}
        whole = all(one["problem"] is None and not one["missing"] for one in status["replicas"])
        return status["engine_restarts"] == 1 and whole


@pytest.mark.parametrize("server", [(2, STEPS + 1)], indirect=True)
def test_the_demos_agent_learns_while_a_replica_is_killed(
    server: VllmServer, tmp_path: Path
) -> None:
    """No call is lost or recorded twice, none is trained under a wrong version."""
    mails = mails_of(tmp_path, 16, 2)
    model = ChatART(model="tiny", base_url=server.base_url, max_tokens=48, max_retries=0)
    trainer = Trainer(
        model,
        group_size=4,
        groups_per_step=4,
        concurrency=16,
        config=TrainConfig(learning_rate=3e-3),
        out_dir=tmp_path / "fit",
    )
    killer = Killer(server)
    killer.start()
    rollout = make_rollout(model, mails)
    result = asyncio.run(trainer.fit(rollout, mails.scenarios("train"), steps=STEPS))
    mails.close()
    assert result.adapter == f"tiny@{STEPS}"
    assert not killer.is_alive() or killer.calls, "nothing was killed"
    assert [step.failed for step in result.history] == [0] * STEPS
    killer.join(300)
    assert not killer.is_alive() and killer.seen
    with server.http() as http:
        jobs = http.get("/v1/jobs", params={"policy": "tiny"}).json()["data"]
        for job in jobs:
            metrics = job["result"]["metrics"]
            assert metrics["logprob_gap_mean"] <= 1e-5 and metrics["probe_change"] > 0
            if job["result"]["version"] == 1:  # before the kill nothing was tokenised again
                assert metrics["rows"] == metrics["runs_trained"]
        page: dict[str, Any] = {"has_more": True, "last_id": None}
        calls: list[str] = []
        while page["has_more"]:
            asked = {"limit": 100} | ({"after": page["last_id"]} if page["last_id"] else {})
            page = http.get("/v1/trajectories", params=asked).json()
            calls += [turn["call_id"] for run in page["data"] for turn in run["turns"]]
        assert len(calls) == len(set(calls)) == http.get("/status").json()["calls"]
        trained = [http.get(f"/v1/calls/{call}").json() for call in calls]
        before, bodies = server.answered(), list[Any]()
        for number in range(4):
            said = {"model": "tiny", "messages": [{"role": "user", "content": f"{number}?"}]}
            bodies.append(http.post("/v1/chat/completions", json=said | {"max_tokens": 8}).json())
        assert [now - then for now, then in zip(server.answered(), before, strict=True)] == [2, 2]
        assert {body["model"] for body in bodies} == {f"tiny@{STEPS}"}
        trained += [http.get(f"/v1/calls/{body['id']}").json() for body in bodies]
    assert check_versions(server, trained) == set(range(STEPS + 1))


class RandomKiller(threading.Thread):
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


@in_soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("server", [(1, 7)], indirect=True)
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
    killer = RandomKiller(server, drawn_seed())
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
