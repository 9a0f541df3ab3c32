"""Three machines as far as the network knows, and a cable that is pulled; needs root on Linux.

Each is a network namespace with an address of its own: the server's machine, and two nodes, each of
which has a rank of the learner and a replica.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hot_swap import train_once
from tests.support.live_server import LiveServer
from tests.support.soak import in_soak

pytestmark = [
    pytest.mark.slow,
    in_soak,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
    ),
    pytest.mark.timeout(600),
]
RAY = str(Path(sys.executable).with_name("ray"))
HEAD = "10.213.0.1:6379"
CONFIG = """
[sampler]
replicas = 2

[learner]
ranks = 2
threads = 1

[ray]
replica = {CPU = 0.5}
learner = {CPU = 1.2}   # a node of two has no room for a second one
"""


def run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    assert not done.returncode, (command, done.stdout, done.stderr)


class Node:
    """A machine of the cluster, by its network."""

    def __init__(self, number: int) -> None:
        self._name, self.address = f"art{number}", f"10.213.0.{number}"
        run(f"ip netns add {self._name}")
        run(f"ip link add art-v{number} type veth peer name eth9 netns {self._name}")
        run(f"ip link set art-v{number} master art-br up")
        run(f"ip -n {self._name} addr add {self.address}/24 dev eth9")
        run(f"ip -n {self._name} link set eth9 up")
        run(f"ip -n {self._name} link set lo up")
        self._cable = f"art-v{number}"

    def join(self) -> None:
        options = "--num-cpus 2 --object-store-memory 100000000 --disable-usage-stats"
        run(
            f"ip netns exec {self._name} {RAY} start --address {HEAD} "
            f"--node-ip-address {self.address} {options}"
        )

    def cable(self, state: str) -> None:
        run(f"ip link set {self._cable} {state}")

    def processes(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self._name], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def stop(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def remove(self) -> None:
        self.stop()
        run(f"ip netns del {self._name}")


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made: list[Node] = []
    run("ip link add art-br type bridge")
    try:
        run("ip addr add 10.213.0.1/24 dev art-br")
        run("ip link set art-br up")
        made += [Node(2), Node(3)]
        options = "--num-cpus 0 --include-dashboard false --disable-usage-stats"
        run(f"{RAY} start --head --node-ip-address 10.213.0.1 --port 6379 {options}")
        for node in made:
            node.join()
        yield made
    finally:
        for node in made:
            node.remove()
        run(f"{RAY} stop --force")
        run("ip link del art-br")


def rank_one(nodes: list[Node]) -> tuple[Node, int]:
    for node in nodes:
        for pid in node.processes():
            with contextlib.suppress(FileNotFoundError):
                if Path(f"/proc/{pid}/comm").read_text() == "distributed\n":
                    return node, pid
    raise AssertionError("no node has rank 1 of the learner")


@pytest.mark.soak("K7", 1, "cut of a node's network in a step of two ranks")
def test_a_step_goes_on_when_a_node_is_cut_off_and_comes_back(
    tmp_path: Path, nodes: list[Node]
) -> None:
    with LiveServer(tmp_path / "data", "--ray", HEAD, settings=CONFIG) as server:
        waited: list[float] = []
        with server.http() as http, server.http() as other:
            train_once(http, 0)
            node, pid = rank_one(nodes)
            os.kill(pid, 19)  # it gets the step, and does not end it
            trained = threading.Event()

            def cut() -> None:
                time.sleep(1.5)
                node.cable("down")
                begun = time.monotonic()
                while not trained.is_set():
                    asked = time.monotonic()
                    messages = [{"role": "user", "content": "When is the audit?"}]
                    body = {"model": "tiny", "messages": messages, "max_tokens": 4}
                    answer = other.post("/v1/chat/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    waited.append(time.monotonic() - asked)
                    if time.monotonic() - begun > 40 and node.processes():
                        node.stop()
                        node.cable("up")
                        node.join()
                        begun = float("inf")
                    time.sleep(0.2)

            cutting = threading.Thread(target=cut)
            cutting.start()
            train_once(http, 1)
            trained.set()
            cutting.join()
            jobs = http.get("/v1/jobs").json()["data"]
            assert sorted(job["result"]["version"] for job in jobs) == [1, 2]
    print(f"{len(waited)} calls answered meanwhile, the slowest after {max(waited):.1f} s")  # noqa: T201
    assert len(waited) > 20 and max(waited) < 60
    assert "died in step 2, which starts again" in server.log.read_text()
