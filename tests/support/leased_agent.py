"""A rollout that workers run by its name, and a worker of it with short leases.

``python -m tests.support.leased_agent URL SECONDS CONCURRENCY``: until SIGTERM, then it writes what
it has done as JSON to standard output.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_art import AsyncArtClient, ChatART, Run, capture
from langchain_art.rollout.worker import LeaseWorker
from tests.support.live_server import REPO

if TYPE_CHECKING:
    from tests.support.forked_start import ForkedProgram

NAME = "tests.support.leased_agent:rollout"


async def rollout(scenario: dict[str, float]) -> Run:
    """Two calls with a pause between them; the reward is drawn from the reply."""
    model = ChatART(model="tiny", max_tokens=4)
    async with capture() as told:
        if scenario.get("raises"):
            raise ValueError("no such tool")
        first = await model.ainvoke(f"Say {scenario['q']}, {told.id}")
        await asyncio.sleep(scenario.get("pause", 0.0))
        second = await model.ainvoke(f"And after {first.text}?")
        told.reward = (sum(second.text.encode()) % 97) / 97
        told.metadata["pid"] = os.getpid()
        if scenario.get("spoils"):
            told.metadata["file"] = "caf\udce9"  # of a file that is not UTF-8
    return told


async def no_run(scenario: object) -> str:
    """What no rollout may return."""
    return "done"


async def work(url: str, seconds: float, concurrency: int) -> None:
    async with AsyncArtClient(url, patience=float("inf")) as client:
        worker = LeaseWorker(rollout, NAME, client, concurrency=concurrency, lease_seconds=seconds)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain, 0.0)
        sys.stdout.write(json.dumps(dataclasses.asdict(await worker.run())))


def start(url: str, log: Path, seconds: float = 2.0, concurrency: int = 4) -> ForkedProgram:
    """A worker in a process of its own, which writes to `log`."""
    return _forked(__name__, [url, str(seconds), str(concurrency)], url, log)


def command(url: str, log: Path, *args: str) -> ForkedProgram:
    """``langchain-art worker ARGS``, likewise."""
    return _forked("langchain_art.cli.main", ["worker", *args], url, log)


def _forked(module: str, args: list[str], url: str, log: Path) -> ForkedProgram:
    from tests.support import forked_start  # needs the server's packages

    env = os.environ | {"ART_BASE_URL": url}
    imports = ("typer", "langchain_art.chat_models", "langchain_art.rollout.worker")
    return forked_start.start(module, args, env, REPO, log, imports)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
