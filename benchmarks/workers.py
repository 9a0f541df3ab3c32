"""Rollouts per second against the number of workers, and what a lease costs.

``workers_2``, ``workers_4``, ``workers_8``: rollouts per second with so many processes of
``langchain-art worker`` over those with one. Each runs two rollouts at once; a rollout is four
calls with a tool of 1 s after each, so that eight workers take a part of one core and the machine
is no limit. The engine answers at once; all else is as it is: HTTP, leases, heartbeats, the store
with a record on disk for each call, completions, and the process that takes what is finished. All
workers are there all the time, each for one of the figures, and rounds alternate.

``lease_overhead``: seconds for the same rollouts by one worker, over those by `gather` in a process
of its own, less 1. Two at once; sixteen calls with a tool of 20 ms after each. Both run at the same
time, so that what else the machine does holds up both alike; median of the rounds.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.stubs.rollouts import by_1
from langchain_art import AsyncArtClient, gather
from langchain_art.rollout.gather import GatherResult, gather_from
from langchain_art.rollout.queued_runs import QueuedRuns
from tests.support.live_server import LiveServer

MODULE = "benchmarks.stubs.rollouts"
WORKERS, ROUNDS, AT_ONCE, EACH = (1, 2, 4, 8), 5, 2, 4
TURNS, TOOL_SECONDS = 4, 1.0
OVERHEAD_ROUNDS, OVERHEAD_RUNS, OVERHEAD_TURNS, OVERHEAD_TOOL = 9, 32, 16, 0.02


@contextmanager
def workers(url: str, *names: str) -> Generator[None]:
    """A process for each of these rollouts, all of which lease by the time that this is entered."""
    argv = [sys.executable, "-m", "langchain_art.cli.main", "worker"]
    more = ["--server", url, "--concurrency", str(AT_ONCE)]
    some = [subprocess.Popen([*argv, name, *more], stderr=subprocess.DEVNULL) for name in names]
    try:
        asyncio.run(_all_there(url, names))
        yield
    finally:
        for one in some:
            one.terminate()
        for one in some:
            one.wait()


async def _all_there(url: str, names: Sequence[str]) -> None:
    async with AsyncArtClient(url) as client:
        while len((await client.status()).workers) != len(names):
            await asyncio.sleep(0.5)
        for name in set(names):  # their first rollouts import
            await _queued(client, name, _scenarios(8 * names.count(name), 1, 0.2))


def _scenarios(count: int, turns: int, seconds: float) -> list[dict[str, Any]]:
    return [{"id": f"q-{n}", "turns": turns, "seconds": seconds} for n in range(count)]


async def _queued(
    client: AsyncArtClient, name: str, scenarios: list[dict[str, Any]]
) -> GatherResult:
    runs = QueuedRuns(client, name, uuid.uuid4().hex, max_failed=0.0, warn=_complain)
    return await gather_from(runs, scenarios, group_size=1)


def _complain(words: str) -> None:
    raise RuntimeError(words)


async def throughput(url: str) -> dict[str, float]:
    rates: dict[int, list[float]] = {count: [] for count in WORKERS}
    async with AsyncArtClient(url) as client:
        for number in range(ROUNDS):
            for count in WORKERS[:: 1 if number % 2 else -1]:
                runs = count * AT_ONCE * EACH
                found = await _queued(
                    client, f"{MODULE}:by_{count}", _scenarios(runs, TURNS, TOOL_SECONDS)
                )
                assert len(found.trajectories) == runs and not found.failed
                rates[count].append(runs / found.seconds)
    over = {n: [a / b for a, b in zip(rates[n], rates[1], strict=True)] for n in WORKERS[1:]}
    figures = {f"workers_{n}": statistics.median(ratios) for n, ratios in over.items()}
    return figures | {f"rollouts_per_second_{n}": statistics.median(rates[n]) for n in WORKERS}


async def _overhead(url: str) -> dict[str, float]:
    scenarios = _scenarios(OVERHEAD_RUNS, OVERHEAD_TURNS, OVERHEAD_TOOL)
    here: list[float] = []
    leased: list[float] = []
    async with AsyncArtClient(url) as client:
        for number in range(OVERHEAD_ROUNDS + 1):
            found, other = await asyncio.gather(
                gather(by_1, scenarios, group_size=1, concurrency=AT_ONCE),
                _queued(client, f"{MODULE}:by_1", scenarios),
            )
            assert len(other.trajectories) == len(found.trajectories) == OVERHEAD_RUNS
            if number:  # the first is to warm up
                here.append(found.seconds)
                leased.append(other.seconds)
    ratios = [a / b - 1 for a, b in zip(leased, here, strict=True)]
    return {
        "lease_overhead": statistics.median(ratios),
        "seconds_here": statistics.median(here),
        "seconds_leased": statistics.median(leased),
    }


def run() -> tuple[dict[str, float], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        server = LiveServer(Path(name) / "data", module="benchmarks.gateways.ours").start()
        os.environ["ART_BASE_URL"] = server.base_url
        try:
            names = [f"{MODULE}:by_{count}" for count in WORKERS for _ in range(count)]
            with workers(server.base_url, *names):
                figures = asyncio.run(throughput(server.base_url))
            with workers(server.base_url, f"{MODULE}:by_1"):
                figures |= asyncio.run(_overhead(server.base_url))
        finally:
            server.stop()
    about = {"rounds": ROUNDS, "at_once": AT_ONCE, "turns": TURNS, "tool_seconds": TOOL_SECONDS}
    return figures, about | {"load_at_end": round(os.getloadavg()[0], 2)}
