"""What replicas of the sampler are worth: calls per second, and what a run's stickiness saves.

``replicas_2``, ``replicas_4``: calls per second with so many replicas over those with one. The
engines are processes that answer eight calls at once, after 0.8 s each, so that the machine's cores
are no limit; all else is as it is (HTTP, gateway, routing, workers' sockets, store). The calls are
those of runs of eight calls each. Rounds alternate.

``sticky_hits_ratio``: tokens of prompts that the prefix cache had, over all of their tokens, with
calls that name their run over the same without, which go to the least loaded replica. Four embedded
engines with a random model; runs of seven calls, 24 at once, each with a prompt of its own and
tools that take up to half a second between its calls.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gateway import PATH, load
from benchmarks.gateways.bare import make_model
from benchmarks.gateways.exchange import messages
from benchmarks.stubs.replicas import SERVICE_SECONDS, SLOTS
from langchain_art_server.backends.base import ChatReply, ChatRequest, Sampling
from langchain_art_server.backends.embedded import process
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.backends.ipc.channel import Channel
from langchain_art_server.backends.replicas.sampler import ReplicatedSampler
from langchain_art_server.config import Settings, TransformersSettings
from tests.support.live_server import LiveServer

REPLICAS, ROUNDS, SECONDS = (1, 2, 4), 3, 10.0
CALLERS, CALLS_OF_A_RUN = 64, 8
ENGINES, RUNS, TURNS, HIT_ROUNDS, TOOL_SECONDS = 4, 24, 7, 3, 0.5


def throughput(folder: Path) -> dict[str, float]:
    rates: dict[int, list[float]] = {count: [] for count in REPLICAS}
    with ExitStack() as stack:
        servers: dict[int, LiveServer] = {}
        for count in REPLICAS:
            servers[count] = LiveServer(
                folder / f"data-{count}",
                module="benchmarks.stubs.replicas",
                env={"REPLICAS": str(count)},
            ).start()
            stack.callback(servers[count].stop)
        for number in range(ROUNDS):
            for count, server in servers.items():
                seen = load(server.port, _calls(server.policy, number), SECONDS)
                rates[count].append(seen["calls"] / seen["seconds"])
    over = {n: [a / b for a, b in zip(rates[n], rates[1], strict=True)] for n in REPLICAS[1:]}
    figures = {f"replicas_{n}": statistics.median(ratios) for n, ratios in over.items()}
    return figures | {f"calls_per_second_{n}": statistics.median(rates[n]) for n in REPLICAS}


def _calls(model: str, number: int) -> list[list[Any]]:
    """Of each caller eight runs, one after the other."""
    callers: list[list[Any]] = []
    for caller in range(CALLERS):
        calls: list[Any] = []
        for run in range(8):
            tags = {"trajectory_id": f"r-{number}-{caller}-{run}", "node": "agent"}
            body = {"model": model, "messages": messages(caller)[:2], "art": tags}
            calls += [(PATH, body)] * CALLS_OF_A_RUN
        callers.append(calls)
    return callers


class CountingHost(process.TransformersHost):
    """Also says how many tokens its prefix cache has given."""

    def __init__(self, settings: Settings, channel: Channel) -> None:
        super().__init__(settings, channel)
        self._methods["hits"] = lambda call: channel.result(call, self._prefixes.hit_tokens)


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Entry point of an engine's process."""
    process.TransformersHost = CountingHost
    process.serve(channel, config)


class CountedSampler(TransformersSampler):
    target = "benchmarks.replicas:serve"


async def sticky_hits(folder: Path) -> dict[str, float]:
    table = TransformersSettings(threads=1, kv_cache_bytes=256 << 20)
    settings = Settings(model=str(make_model(folder / "model")), sampler=table)
    engines = [CountedSampler(settings) for _ in range(ENGINES)]
    sampler = ReplicatedSampler(engines)
    await sampler.start()

    async def hits() -> int:
        return sum([await one.call("hits", {}) for one in engines])

    async def run(seed: int, name: str) -> int:
        tokens, said, tools = 0, messages(seed), random.Random(seed)
        for turn in range(TURNS):
            request = ChatRequest(
                id=f"{seed}-{turn}",
                messages=said[: 2 + 2 * turn],
                sampling=Sampling(max_tokens=4),
                run=name,
            )
            async for piece in sampler.chat(request):
                if isinstance(piece, ChatReply):
                    tokens += len(piece.prompt_token_ids)
            await asyncio.sleep(tools.uniform(0.0, TOOL_SECONDS))
        return tokens

    rates: dict[bool, list[float]] = {True: [], False: []}
    try:
        for number in range(2 * HIT_ROUNDS):
            sticky, before = number % 2 == 0, await hits()
            seeds = range(number * RUNS, (number + 1) * RUNS)
            runs = [run(seed, f"r{seed}" if sticky else "") for seed in seeds]
            tokens = sum(await asyncio.gather(*runs))
            rates[sticky].append((await hits() - before) / tokens)
    finally:
        await sampler.close()
    with_runs, without = (statistics.median(rates[sticky]) for sticky in (True, False))
    return {
        "sticky_hits_ratio": with_runs / without,
        "hit_rate_sticky": with_runs,
        "hit_rate_least_loaded": without,
    }


def run() -> tuple[dict[str, float], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        figures = throughput(Path(name)) | asyncio.run(sticky_hits(Path(name)))
    about = {
        "callers": CALLERS,
        "slots": SLOTS,
        "service_seconds": SERVICE_SECONDS,
        "rounds": ROUNDS,
    }
    return figures, about | {"engines": ENGINES, "runs": RUNS, "turns": TURNS}
