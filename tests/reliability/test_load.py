"""Many clients, slow ones, too many, many records: served or refused in words, in bounded memory.

The engine is a stub that waits. Times are printed, not asserted: they are the machine's.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import engines, resident
from tests.support.live_server import REPO, ForkedServer, LiveServer
from tests.support.soak import count, in_soak, share
from tests.support.stub_engines import StubServer

CLIENTS, SECONDS = count(100, 1000), count(2, 600)
SLOW = count(60, 1000)
OVERLOADED = count(1, 300)
HOSTILE, CONNECTIONS = count(2, 600), count(100, 1100)  # of each address
ROLLOUTS, RUNNERS = count(200, 50_000), count(64, 2048)
SAY = '{"model": "tiny", "messages": [{"role": "user", "content": "Say %"}]}'
CHAT = {"path": "/v1/chat/completions", "body": SAY}


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    folder = tmp_path_factory.mktemp("load")
    with StubServer(folder / "data", seconds=(0.05, 0.5), alone=share() > 0) as made:
        yield made


@contextlib.contextmanager
def load(server: LiveServer, **what: Any) -> Generator[dict[str, Any]]:
    """A load that runs beside the context; what it saw is there at the end."""
    argv = [sys.executable, "-m", "tests.support.load_client"]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO)
    seen: dict[str, Any] = {}
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps({"port": server.port} | what).encode())
        child.stdin.close()
        yield seen
        seen |= json.loads(child.stdout.read())
        assert child.wait() == 0
    finally:
        child.kill()
        child.wait()


def only(seen: dict[str, Any], *statuses: str) -> None:
    assert set(seen["statuses"]) <= set(statuses), seen["statuses"]
    assert seen["without_retry_after"] == 0
    assert seen["statuses"].get("200", 0) > 0


def told(seen: dict[str, Any], times: str) -> str:
    answers = ", ".join(f"{many:,} answers {status}" for status, many in seen["statuses"].items())
    found = seen[times]
    return f"{answers}; {times} median {found['median']:.0f} ms, p99 {found['p99']:.0f} ms"


@in_soak  # `test_overload_is_refused_and_ends` has more clients
@pytest.mark.soak("L1", CLIENTS, f"clients for {SECONDS} s, {CLIENTS // 2} requests a second")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 1200))
def test_many_clients_are_served_in_flat_memory(server: StubServer) -> None:
    # All at once, first: what a stall of the machine needs at any moment is no growth.
    with load(server, **CHAT, clients=CLIENTS, seconds=count(1, 10)) as at_once:
        pass
    only(at_once, "200", "429", "503")
    with Memory(server) as memory:
        pace = CLIENTS / 2
        with load(server, **CHAT, clients=CLIENTS, pace=pace, seconds=SECONDS) as seen:
            pass
    only(seen, "200", "429", "503")
    with server.http() as http:
        calls = at_once["statuses"]["200"] + seen["statuses"]["200"]
        assert http.get("/status").json()["calls"] == calls
    rate = seen["statuses"]["200"] / seen["seconds"]
    print(f"{rate:.0f} a second; {told(seen, 'added')}; {memory.bounded()}")  # noqa: T201


def slowly(server: StubServer, number: int) -> socket.socket:
    """A connection whose header, body, or answer goes on for ever."""
    one = socket.create_connection(("127.0.0.1", server.port), 120)
    if number % 3 == 0:
        one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: ")
    elif number % 3 == 1:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        one.sendall(head + b"Content-Type: application/json\r\nContent-Length: 99999\r\n\r\n{")
    else:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
    return one


@in_soak  # `test_four_hostile_addresses_keep_nothing_from_a_fifth` has slow clients of each kind
@pytest.mark.soak("L2", SLOW, "slow clients beside 100 honest ones")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 600))
def test_slow_clients_hold_up_no_honest_one(server: StubServer) -> None:
    honest = {"clients": 100, "pace": 100.0, "seconds": count(2, 30)}
    with load(server, **CHAT, **honest) as alone:
        pass
    slow = [slowly(server, number) for number in range(SLOW)]
    begun, ended = time.monotonic(), threading.Event()

    def drip() -> None:
        while not ended.wait(1.0):
            for number, one in enumerate(slow):
                if number % 3 < 2:
                    with contextlib.suppress(OSError):
                        one.send(b"a")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with load(server, **CHAT, **honest) as beside:
            pass
        # By its deadline of ten seconds; a body has sixty.
        for one in slow[::3] if share() else ():
            with contextlib.suppress(ConnectionError):
                while one.recv(4096):
                    pass
    finally:
        ended.set()
        dripping.join()
        for one in slow:
            one.close()
    for seen in (alone, beside):
        only(seen, "200")
    took = time.monotonic() - begun
    print(  # noqa: T201
        f"p99 {alone['latency']['p99']:.0f} ms alone, {beside['latency']['p99']:.0f} ms beside; "
        f"{took:.0f} s until slow headers were closed"
    )


@pytest.mark.soak("L4", HOSTILE, f"seconds of 4 addresses at once, {4 * CONNECTIONS:,} connections")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 1200))
def test_four_hostile_addresses_keep_nothing_from_a_fifth(tmp_path: Path) -> None:
    # A bound that the load reaches: what an operator allows for keys and values is no growth.
    settings = f"[sampler]\nkv_cache_bytes = {8 << 20}\n"
    kind = LiveServer if share() else ForkedServer  # in the soak it shares no memory
    server = kind(tmp_path / "attacked", settings=settings).start()
    body = SAY.replace("}]}", '}], "max_tokens": 4}')
    honest = {"clients": 20, "pace": 20.0, "host": "127.0.0.6", "body": body}
    argv = [sys.executable, "-m", "tests.support.hostile_client", str(server.port)]
    attackers = list[subprocess.Popen[bytes]]()
    try:
        with server.http() as http:
            batch = {"batch": "b", "rollout": "r", "rollouts": [{"id": "b-0", "scenario": {}}]}
            assert http.post("/v1/rollouts", json=batch).status_code == 200
        with load(server, **(CHAT | honest), seconds=count(1, 30)) as alone:
            pass
        with Memory(server) as memory:
            for number in range(2, 6):
                more = [f"127.0.0.{number}", str(HOSTILE + 2), str(CONNECTIONS)]
                attackers.append(subprocess.Popen([*argv, *more], stdout=subprocess.PIPE, cwd=REPO))
            with load(server, **(CHAT | honest), seconds=HOSTILE) as beside:
                pass
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
            with load(server, **CHAT, clients=48, seconds=count(1, 20)) as peak:
                pass
            with load(server, **CHAT, clients=480, seconds=OVERLOADED, pause=0.5) as over:
                pass
            with load(server, **CHAT, clients=24, seconds=count(1, 10)) as after:
                pass
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
        f"({rates[1] / rates[0]:.2f}); {told(over, 'latency')}; {memory.bounded()}"
    )


@in_soak  # many senders, and a kill: `tests/reliability/test_exactly_once.py`
@pytest.mark.soak("L5", ROLLOUTS, f"rollouts stored by {RUNNERS:,} runners")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 1200))
def test_many_runners_store_their_rollouts(server: StubServer) -> None:
    body = json.dumps({"id": "run-%", "scenario": "s", "reward": 0.5, "metadata": {"n": "%"}})
    many = {"path": "/v1/trajectories", "body": body, "clients": RUNNERS, "requests": ROLLOUTS}
    with Memory(server) as memory, load(server, **many) as seen:
        pass
    assert seen["statuses"] == {"200": ROLLOUTS}
    server.kill()
    server.alone = False  # a start costs less
    server.start()
    with server.http() as http:
        assert http.get("/status").json()["trajectories"] == ROLLOUTS
    rate = ROLLOUTS / seen["seconds"]
    print(f"{rate:.0f} a second; {told(seen, 'latency')}; {max(memory.samples):.0f} MiB")  # noqa: T201
