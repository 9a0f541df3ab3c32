"""Two vLLMs behind the real server: the demo's agent learns, and goes on when one is killed."""

import asyncio
import os
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
from tests.support.vllm_engine import children, command, gone, guards_of, vllm_toml, wide_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("vllm-replicas"),
]
STEPS = 2


class ReplicatedServer(LiveServer):
    """The server with two vLLMs, as a user starts it."""

    def __init__(self, folder: Path) -> None:
        toml = vllm_toml(folder / "art.toml", {"replicas": 2}, keep_checkpoints=STEPS + 1)
        model = wide_model(folder / "model")
        super().__init__(folder / "data", "--config", str(toml), model=model)

    def guards(self) -> list[int]:
        assert self.process is not None
        return guards_of(self.process.pid)

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedServer]:
    made = ReplicatedServer(tmp_path_factory.mktemp("vllm-replicas")).start(timeout=900)
    yield made
    held = [pid for guard in made.guards() for pid in [guard, *children(guard)]]
    made.kill()  # kill -9: nothing of ours is left to clean up
    assert gone(held)


class Killer(threading.Thread):
    """Kills a process of one vLLM when both have calls and a version was published."""

    def __init__(self, server: ReplicatedServer) -> None:
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
                    os.kill(children(self.server.guards()[-1])[0], signal.SIGKILL)
                    self.calls = calls
            while not self.back(http.get("/status").json()):
                assert http.get("/readyz").status_code == 200
                time.sleep(0.05)

    def back(self, status: dict[str, Any]) -> bool:
        self.seen |= {one["problem"] for one in status["replicas"] if one["problem"]}
        whole = all(one["problem"] is None and not one["missing"] for one in status["replicas"])
        return status["engine_restarts"] == 1 and whole


def test_the_demos_agent_learns_while_a_replica_is_killed(
    server: ReplicatedServer, tmp_path: Path
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
