"""Raylets on this machine: what is lost with one comes back on another."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from langchain_art.errors import ConfigError
from langchain_art.ray import RayWorkers, worker_pool
from langchain_art.ray.placed_actors import ActorsUnavailable, PlacedActors, connect
from tests.support.hot_swap import train_once
from tests.support.live_server import LiveServer
from tests.support.ray_cluster import LocalCluster, local_cluster
from tests.support.soak import in_soak, in_soak_alone
from tests.support.stub_engines import StubServer
from tests.support.trainers import trainer_of

pytestmark = pytest.mark.slow
CALLS = 12
#: A node has room for one replica, and the learner beside it.
CONFIG = """
[sampler]
replicas = 2

[ray]
replica = {CPU = 1.5}
learner = {CPU = 0.5}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(nodes=2, cpus=2) as made:
        yield made


@pytest.fixture
def joined(cluster: LocalCluster) -> Iterator[None]:
    connect(cluster.address)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("joined")
def test_a_call_of_an_actor_has_a_deadline_and_its_error_and_no_room_is_said_in_time() -> None:
    class Refusing:
        """An actor. It is sent: to import this module would take its process a second."""

        def refuse(self, what: str) -> None:
            raise ConfigError(f"got {what}")

        def sleep(self, seconds: float) -> None:
            time.sleep(seconds)

    placed = PlacedActors("Replica 3", Refusing, {"CPU": 3, "GPU": 1})
    with pytest.raises(ActorsUnavailable, match=r"Replica 3 waits .* Missing: CPU, GPU.$") as no:
        placed.wait(0.5)
    assert "needs CPU 3 and GPU 1 on one node" in str(no.value)
    assert "3 nodes with CPU 4 (4 free), GPU 0 (0 free), and at most CPU 2" in str(no.value)
    placed.close()
    placed = PlacedActors("Replica 0", Refusing, {"CPU": 1})
    placed.wait(60)
    assert placed.problem is None
    with pytest.raises(ConfigError, match=r"^got this$"):
        placed.call("refuse", "this", seconds=30)
    with pytest.raises(ActorsUnavailable, match=r"did nothing for 0\.2 s, in sleep"):
        placed.call("sleep", 5, seconds=0.2)
    placed.close()


@pytest.mark.usefixtures("joined")
async def test_a_worker_without_room_is_said_and_the_fit_may_end_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_pool, "_STOP_SECONDS", 0.1)  # it is nowhere, and has no lease
    monkeypatch.setattr(worker_pool, "_LOOK_SECONDS", 0.2)
    said: list[str] = []
    chosen = RayWorkers(1, needs={"spot": 1})
    async with worker_pool.worker_pool(
        chosen, "m:rollout", "http://127.0.0.1:1/v1", None, 1, said.append
    ):
        async with asyncio.timeout(60):
            while not said:
                await asyncio.sleep(0.05)
    assert said[0].startswith("Worker 0 waits for room") and said[0].endswith("Missing: spot.")


def test_a_cluster_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match=r"Ray cluster 'nonsense', which cannot be joined"):
        connect("nonsense")


@pytest.mark.usefixtures("joined")
async def test_a_rollout_that_no_node_can_import_ends_the_fit(
    tmp_path: Path, cluster: LocalCluster, art_server: LiveServer
) -> None:
    workers = RayWorkers(1, address=cluster.address)
    trainer = trainer_of(art_server, tmp_path / "fit", "tiny", workers=workers)
    with pytest.raises(ConfigError, match=r"On a node of the Ray cluster: .*no_such_agent"):
        await trainer.evaluate("no_such_agent:rollout", ["a"])
    deadline = time.monotonic() + 60
    while any(cluster.hosts("RolloutActor")):  # it is gone with the evaluation
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


def until(http: httpx.Client, holds: Callable[[list[dict[str, Any]]], bool]) -> Any:
    deadline = time.monotonic() + 120
    while not holds(found := http.get("/status").json()["replicas"]):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def replica_node(cluster: LocalCluster) -> int:
    """A node with a replica; without the learner, if there is one."""
    hosts = cluster.hosts("EngineHost")
    learner = cluster.learner()[0] if sum(hosts) > 2 else None
    return max(range(len(hosts)), key=lambda node: (hosts[node] - (node == learner), -hosts[node]))


def ask(http: httpx.Client, number: int, tokens: int) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"When is audit {number}?"}]}
    body |= {"max_tokens": tokens, "temperature": 2.0, "art": {"trajectory_id": f"run-{number}"}}
    return http.post("/v1/chat/completions", json=body)


def until_it_trains(server: LiveServer) -> None:
    deadline = time.monotonic() + 60
    with server.http() as http:
        while time.monotonic() < deadline:
            for job in http.get("/v1/jobs").json()["data"]:
                events = http.get(f"/v1/jobs/{job['id']}/events").json()["data"]
                trains = any(event["message"].startswith("training ") for event in events)
                if trains and job["state"] == "running":
                    return
            time.sleep(0.05)
    raise AssertionError("no job has come to its step")


def train_without(
    cluster: LocalCluster,
    server: LiveServer,
    http: httpx.Client,
    node: int,
    process: int,
    number: int = 0,
) -> None:
    """A step that one of the learner's processes gets and does not end, and whose node is lost."""
    os.kill(process, signal.SIGSTOP)

    def kill() -> None:
        until_it_trains(server)
        time.sleep(1.0)
        cluster.kill(node)

    killer = threading.Thread(target=kill)
    killer.start()
    train_once(http, number)
    killer.join()
    with contextlib.suppress(ProcessLookupError):  # Ray may have ended it
        os.kill(process, signal.SIGKILL)  # on a machine that is lost it would be, too


@pytest.mark.parametrize("real", [False, in_soak_alone(True)])
def test_a_lost_nodes_replica_and_step_come_back_on_another(
    real: bool, cluster: LocalCluster, tmp_path: Path
) -> None:
    """Replicas that compute nothing, and in `make soak` real ones, and a learner's step."""
    while cluster.alive < 2 + real:
        cluster.add(2)
    kind = LiveServer if real else partial(StubServer, seconds=(1.0, 1.5))
    with (
        kind(tmp_path / "data", "--ray", cluster.address, settings=CONFIG) as server,
        server.http() as http,
        ThreadPoolExecutor(CALLS) as pool,
    ):
        assert sum(cluster.hosts("EngineHost")) == 2 + real
        train_once(http, 0)
        calls = list[Future[httpx.Response]]()
        while True:  # on a busy machine they may end before they are seen to run
            calls = [pool.submit(ask, http, number, 200) for number in range(CALLS)]
            seen = until(
                http,
                lambda found, calls=calls: (
                    all(one["running_calls"] for one in found) or all(call.done() for call in calls)
                ),
            )
            if all(one["running_calls"] for one in seen):
                break
        cluster.kill(lost := replica_node(cluster))
        # Its calls are made again on the other one.
        answers = [call.result() for call in calls]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.json()["model"] for answer in answers} == {"tiny@1"}
        if real:  # two nodes are left
            # They may have ended before the loss was noticed: none has a problem until then.
            back = until(
                http,
                lambda found: (
                    any(one["restarts"] for one in found)
                    and not any(one["problem"] for one in found)
                ),
            )
            assert sum(one["restarts"] for one in back) == 1
            assert [one["missing"] for one in back] == [0, 0]
            hosts = cluster.hosts("EngineHost")
            assert hosts[lost] == 0 and sum(hosts) == 3
            cluster.kill(replica_node(cluster))
        # One is left. With it alone, a replica waits, and says for what.
        waits = until(http, lambda found: any("waits" in (one["problem"] or "") for one in found))
        [problem] = [one["problem"] for one in waits if one["problem"]]
        assert "needs CPU 1.5 on one node" in problem and problem.endswith("Missing: CPU")
        assert ask(http, 99, 8).json()["model"] == "tiny@1"
        train_once(http, 1)
        cluster.add(2)
        back = until(http, lambda found: not any(one["problem"] for one in found))
        assert sum(one["restarts"] for one in back) == 1 + real
        models = [ask(http, 100 + number, 4).json()["model"] for number in range(4)]
        assert models == ["tiny@2"] * 4
        if not real:
            return
        # The step of a learner whose node is lost begins again on another node.
        train_without(cluster, server, http, *cluster.learner(), number=2)
        jobs = http.get("/v1/jobs").json()["data"]
        found = sorted((job["result"]["version"], job["state"]) for job in jobs)
        assert found == [(version, "succeeded") for version in (1, 2, 3)]
        assert ask(http, 200, 4).json()["model"] == "tiny@3"
    assert "died in step 3, which starts again" in server.log.read_text()


@in_soak
@pytest.mark.soak("K6", 1, "loss of a node with one of two ranks")
def test_ranks_are_on_two_nodes_and_a_step_begins_again_when_one_is_lost(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    while cluster.alive < 3:
        cluster.add(2)
    own = "learner = {CPU = 1.5}\n\n[learner]\nranks = 2\nthreads = 1\n"
    settings = "[ray]\nreplica = {CPU = 0.5}\n" + own
    with (
        LiveServer(tmp_path / "data", "--ray", cluster.address, settings=settings) as server,
        server.http() as http,
    ):
        (first, _), (second, other) = cluster.learner(), cluster.learner("distributed")
        assert first != second
        train_without(cluster, server, http, second, other)
        assert second not in (cluster.learner()[0], cluster.learner("distributed")[0])
        train_once(http, 1)
        jobs = http.get("/v1/jobs").json()["data"]
        found = sorted((job["result"]["version"], job["state"]) for job in jobs)
        assert found == [(1, "succeeded"), (2, "succeeded")]
        assert ask(http, 100, 4).json()["model"] == "tiny@2"
    assert "died in step 1, which starts again" in server.log.read_text()
