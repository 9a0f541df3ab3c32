"""Hostile clients and too many: served or refused in words, in bounded memory."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import engines, resident
from tests.support.live_server import REPO, ForkedServer, LiveServer
from tests.support.soak import count, share
from tests.support.stub_engines import StubServer

OVERLOADED = count(1, 300)
HOSTILE, CONNECTIONS = count(2, 600), count(100, 1100)  # of each address
SAY = '{"model": "tiny", "messages": [{"role": "user", "content": "Say %"}]}'


class Memory(threading.Thread):
    """Samples a server's memory, with its engines', in MiB."""

    def __init__(self, server: LiveServer) -> None:
        super().__init__(daemon=True)
        assert server.process is not None
        self._pids = [server.process.pid, *engines(server)]
        self._stop_it = threading.Event()
        self.samples: list[float] = []

    def __enter__(self) -> Memory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_it.set()
        self.join()

    def run(self) -> None:
        while not self._stop_it.wait(0.1):
            self.samples.append(resident(self._pids) / 2**20)

    def bounded(self) -> str:
        """The last tenth against the second; fails if it grew as it would without a bound."""
        tenth = len(self.samples) // 10 or 1
        parts = self.samples[tenth : 2 * tenth], self.samples[-tenth:]
        second, last = map(statistics.fmean, parts)
        # 96: half of what such a server holds; a forked one has its parent's pages, too.
        assert last <= (second * 1.05 if share() >= 0.5 else second + 96), (second, last)
        return f"memory {second:.0f} -> {last:.0f} MiB, ratio {last / second:.3f}"


def load(server: LiveServer, **what: Any) -> dict[str, Any]:
    """What clients of a process of their own saw."""
    argv = [sys.executable, "-m", "tests.support.load_client"]
    told = json.dumps({"port": server.port, "body": SAY} | what)
    done = subprocess.run(argv, input=told, stdout=subprocess.PIPE, text=True, cwd=REPO, check=True)
    return json.loads(done.stdout)


def only(seen: dict[str, Any], *statuses: str) -> None:
    assert set(seen["statuses"]) <= set(statuses), seen["statuses"]
    assert seen["without_retry_after"] == 0
    assert seen["statuses"].get("200", 0) > 0


@pytest.mark.soak("L4", HOSTILE, f"seconds of 4 addresses at once, {4 * CONNECTIONS:,} connections")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 1200))
def test_four_hostile_addresses_keep_nothing_from_a_fifth(tmp_path: Path) -> None:
    # A bound that the load reaches: what an operator allows for keys and values is no growth.
    settings = f"[sampler]\nkv_cache_bytes = {8 << 20}\n"
    kind = LiveServer if share() else ForkedServer  # in the soak it shares no memory
    server = kind(tmp_path / "attacked", settings=settings).start()
    body = SAY.replace("}]}", '}], "max_tokens": 4}')
    honest = {"clients": 20, "between": 1.0, "host": "127.0.0.6", "body": body}
    argv = [sys.executable, "-m", "tests.support.hostile_client", str(server.port)]
    attackers = list[subprocess.Popen[bytes]]()
    try:
        with server.http() as http:
            batch = {"batch": "b", "rollout": "r", "rollouts": [{"id": "b-0", "scenario": {}}]}
            assert http.post("/v1/rollouts", json=batch).status_code == 200
        alone = load(server, **honest, seconds=count(1, 30))
        with Memory(server) as memory:
            for number in range(2, 6):
                more = [f"127.0.0.{number}", str(HOSTILE + 2), str(CONNECTIONS)]
                attackers.append(subprocess.Popen([*argv, *more], stdout=subprocess.PIPE, cwd=REPO))
            beside = load(server, **honest, seconds=HOSTILE)
        begun = [json.loads(one.communicate()[0]) for one in attackers]
        logged = server.log.stat().st_size
        with server.http() as http:  # the engine hears of who has gone between two of its steps
            while http.get("/status").json()["running_calls"]:
                time.sleep(0.1)
    finally:
        for one in attackers:
            one.kill()
        server.stop()
    only(alone, "200")
    only(beside, "200")
    most, idle = max(memory.samples), memory.samples[0]
    print(  # noqa: T201
        f"p99 {alone['latency']['p99']:.0f} ms alone, {beside['latency']['p99']:.0f} ms beside; "
        f"memory {idle:.0f} -> {most:.0f} MiB, ratio {most / idle:.2f}; {logged:,} bytes of log; "
        f"{sum(sum(one.values()) for one in begun):,} hostile connections"
    )
    # Of a few seconds, the most is what the connections and the calls of the first second take.
    assert not share() or most <= 1.3 * idle, (idle, most)
    added = beside["latency"]["p99"] - alone["latency"]["p99"]
    assert not share() or added <= 1000, (alone["latency"], beside["latency"])
    assert logged < 256 << 10, server.log.read_text()[-4000:]


@pytest.mark.soak("L3", OVERLOADED, "seconds of ten times the capacity")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 900))
def test_overload_is_refused_and_ends(tmp_path: Path) -> None:
    few, alone = "max_running_calls = 48\n", share() > 0
    with StubServer(tmp_path / "few", seconds=(0.05, 0.5), settings=few, alone=alone) as server:
        with Memory(server) as memory:
            peak = load(server, clients=48, seconds=count(1, 20))
            over = load(server, clients=480, seconds=OVERLOADED, pause=0.5)
            after = load(server, clients=24, seconds=count(1, 10))
        only(peak, "200", "429")
        only(over, "200", "429", "503")
        assert over["statuses"]["429"] > 0
        only(after, "200", "429")  # the last of the many may still run when the few come
        with server.http() as http:
            status = http.get("/status").json()
        assert status["running_calls"] == 0
        assert status["calls"] == sum(one["statuses"]["200"] for one in (peak, over, after))
    rates = [one["statuses"]["200"] / one["seconds"] for one in (peak, over)]
    print(  # noqa: T201
        f"{rates[0]:.0f} calls a second at the peak, {rates[1]:.0f} under overload "
        f"({rates[1] / rates[0]:.2f}); {over['statuses']}, p99 {over['latency']['p99']:.0f} ms; "
        f"{memory.bounded()}"
    )
