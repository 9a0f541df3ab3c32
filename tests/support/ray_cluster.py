"""A Ray cluster of several nodes on this machine; a node is lost by ``kill -9`` of its raylet."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tests.support.engines import children

T = TypeVar("T")

#: The head notices a lost node within 3 s instead of 16, and nobody is told about usage. Else
#: Ray kills actors when the machine's memory is nearly full, and gives them the least of the
#: processors (nice 15): beside other tests, an empty actor took more than 60 s to start.
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
}
_MEMORY = 80 << 20


class LocalCluster:
    """A head without room for anything, and nodes of as many CPUs each."""

    def __init__(self, nodes: int, cpus: float) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": _MEMORY, "include_dashboard": False}
        self._cluster = _patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.address: str = self._cluster.address
        self._nodes: list[Any] = []
        for _ in range(nodes):
            self.add(cpus)

    def add(self, cpus: float) -> None:
        options = {"num_cpus": cpus, "object_store_memory": _MEMORY}
        self._nodes.append(_patiently(lambda: self._cluster.add_node(**options)))

    def hosts(self, actor: str) -> list[int]:
        """How many actors of a class each node has; those that live."""
        return [len(_actors(_raylet(node), actor)) for node in self._nodes]

    def learner(self, process: str = "peft") -> tuple[int, int]:
        """The node whose actor has the learner's rank 0, and its process.

        ``distributed`` is that of another rank.
        """
        for number, node in enumerate(self._nodes):
            for actor in _actors(_raylet(node), "EngineHost"):
                for one in children(actor):
                    if _comm(one) == process:
                        return number, one
        raise AssertionError("no node has the learner")

    @property
    def alive(self) -> int:
        """How many nodes are not killed."""
        return sum(_comm(_raylet(node)) == "raylet" for node in self._nodes)

    def kill(self, number: int) -> None:
        """``kill -9`` of a node's raylet; its actors end themselves within a second."""
        raylet = self._nodes[number].all_processes["raylet"][0].process
        raylet.kill()
        raylet.wait()

    def close(self) -> None:
        self._cluster.shutdown()


def _raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


def _actors(raylet: int, actor: str) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if f"ray::{actor}" in Path(f"/proc/{child}/cmdline").read_text():
                    found.append(int(child))
    return found


def _comm(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _patiently(start: Callable[[], T]) -> T:
    """Ray gives a node 30 s to start, and raises a plain exception then: the machine is busy."""
    for _ in range(3):
        try:
            return start()
        except Exception:  # noqa: BLE001
            time.sleep(10)
    return start()


@contextlib.contextmanager
def local_cluster(nodes: int, cpus: float) -> Iterator[LocalCluster]:
    made = LocalCluster(nodes, cpus)
    try:
        yield made
    finally:
        made.close()
