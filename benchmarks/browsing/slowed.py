"""What viewers of the page take from the gateway: calls per second with them, over those without.

The load is that of `benchmarks.gateway`: 64 callers, an engine that answers at once. Beside it, in
both halves of a pair, a group of runs is added every quarter of a second, so that the viewers have
something to ask for again. Which half comes first alternates.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from benchmarks.browsing.fill import run_of
from benchmarks.gateway import CALLERS, PATH, cpu_seconds, load
from benchmarks.gateways.exchange import messages
from tests.support.live_server import LiveServer

VIEWERS, PAIRS, SECONDS, GROUP_SECONDS = 50, 21, 4.0, 0.25


@contextmanager
def watched(port: int, seen: list[dict[str, int]]) -> Iterator[None]:
    argv = [sys.executable, "-m", "benchmarks.browsing.viewers", str(port), str(VIEWERS)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    time.sleep(2.0)  # they have what they show
    yield
    said, problem = child.communicate("")
    if child.returncode:
        raise RuntimeError(problem[-2000:])
    seen.append(json.loads(said))


@contextmanager
def runs_that_come(server: LiveServer, begin: int) -> Iterator[None]:
    """Groups of new runs, whose numbers begin with `begin`, until it ends."""
    ended = threading.Event()

    def add() -> None:
        with server.http() as http:
            number = begin
            while not ended.wait(GROUP_SECONDS):
                runs = [run_of(number + one, number + 8)[0] for one in range(4)]
                number += len(runs)
                sent = [run.model_dump(mode="json") for run in runs]
                body = {"id": f"group-{number}", "trajectories": sent}
                http.post("/v1/groups", json=body).raise_for_status()

    thread = threading.Thread(target=add)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def slowed(data: Path, pairs: int = PAIRS) -> tuple[dict[str, float], dict[str, object]]:
    server = LiveServer(data, module="benchmarks.gateways.ours").start()
    assert server.process is not None
    callers = [
        [(PATH, {"model": server.policy, "messages": messages(one)})] for one in range(CALLERS)
    ]
    rates: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    seen: list[dict[str, int]] = []
    try:
        load(server.port, callers, 1.0)
        for pair in range(pairs):
            for half, with_viewers in enumerate((pair % 2 == 0, pair % 2 == 1)):
                begin = 1_000_000 + (2 * pair + half) * 10_000
                viewers = watched(server.port, seen) if with_viewers else nullcontext()
                with viewers, runs_that_come(server, begin):
                    before = cpu_seconds(server.process.pid)
                    found = load(server.port, callers, SECONDS)
                    spent = cpu_seconds(server.process.pid) - before
                rates[with_viewers].append(found["calls"] / found["seconds"])
                cpu[with_viewers].append(spent / found["calls"] * 1e6)
    finally:
        server.stop()
    ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
    figures = {
        "viewers_calls_ratio": statistics.median(ratios),
        "calls_per_second": statistics.median(rates[False]),
        "server_cpu_us_per_call": statistics.median(cpu[False]),
        "server_cpu_us_per_call_watched": statistics.median(cpu[True]),
    }
    about: dict[str, object] = {"viewers": VIEWERS, "callers": CALLERS, "pairs": pairs}
    about["ratios"] = [round(one, 3) for one in ratios]
    for name in ("events", "answers"):
        about[f"{name}_of_a_viewer_a_second"] = round(
            sum(one[name] for one in seen) / len(seen) / VIEWERS / (SECONDS + 2.0), 2
        )
    return figures, about
