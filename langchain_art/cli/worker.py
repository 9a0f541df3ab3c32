"""`langchain-art worker`: run rollouts that fits have put up on a server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from langchain_art.cli import options

if TYPE_CHECKING:
    from langchain_art.rollout.worker import LeaseWorker, WorkerCounts

#: Seconds between two lines of progress where no terminal shows it.
_EVERY = 30.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def worker(
    rollout: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION", help="The rollout, as the fit that puts it up names it."
        ),
    ],
    server: options.BaseUrl = None,
    concurrency: Annotated[int, typer.Option(min=1, max=500, help="Most rollouts at once.")] = 64,
) -> None:
    """Run rollouts that `Trainer(workers="server")` has put up, on this machine.

    Start as many as you like, on any machine that reaches the server and can import the module;
    its key is in ART_API_KEY (scopes infer and submit). Each leases as many rollouts as it has
    free, runs them, and sends what happened. The rollout's ChatART calls the same server, unless
    it names another one.

    Ctrl-C or SIGTERM: it leases no more, finishes what ends within 20 seconds, and hands the rest
    back; a second one hands all back at once. A worker that is killed loses nothing: its leases end
    after 60 seconds, and other workers run what it had.

    \b
    Examples:
      langchain-art worker my_agent:rollout --server http://trainer.example:8000/v1
      langchain-art worker train:rollout --concurrency 16
    """
    from langchain_art.rollout.scenarios import load

    if server is not None:
        os.environ["ART_BASE_URL"] = server  # of the rollout's own ChatART
    asyncio.run(_work(load(rollout), rollout, server, concurrency))


async def _work(rollout: Any, name: str, server: str | None, concurrency: int) -> None:
    from langchain_art.client.async_client import AsyncArtClient
    from langchain_art.rollout.worker import LeaseWorker

    say = partial(options.say, on=options.stderr)
    async with AsyncArtClient(server, patience=float("inf"), on_wait=say) as client:
        await client.ready(timeout=10)
        mine = LeaseWorker(rollout, name, client, concurrency=concurrency, say=say)
        say(f"Worker of {name} for {client.base_url}: {concurrency} rollouts at once.")
        loop, begun = asyncio.get_running_loop(), time.monotonic()
        asked: list[int] = []

        def drain() -> None:
            asked.append(1)
            if len(asked) == 1:
                say(f"Stopping: {mine.counts.running} runs have 20 s to end. Again: at once.")
            mine.drain(20.0 if len(asked) == 1 else 0.0)

        for one in _SIGNALS:
            loop.add_signal_handler(one, drain)
        shown = asyncio.create_task(_show(mine, begun))
        try:
            found = await mine.run()
        finally:
            shown.cancel()
            await asyncio.gather(shown, return_exceptions=True)
            for one in _SIGNALS:
                loop.remove_signal_handler(one)
    say(f"Ended after {time.monotonic() - begun:.0f} s: {_words(found)}.")
    if found.handed_back:  # a thread of a rollout cannot be stopped, and would be waited for
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def _show(mine: LeaseWorker, begun: float) -> None:
    """Show for ever what the worker does: in a terminal in one line, else a line now and then."""
    if options.stderr.is_terminal:
        with options.stderr.status("") as status:
            while True:
                rate = mine.counts.finished / max(time.monotonic() - begun, 1e-9)
                status.update(f"{_words(mine.counts)}, {rate:.2f} a second")
                await asyncio.sleep(0.5)
    said = mine.counts
    while True:
        await asyncio.sleep(_EVERY)
        if mine.counts != said:
            said = mine.counts
            options.say(_words(said), on=options.stderr)


def _words(counts: WorkerCounts) -> str:
    """``3 runs under way, 120 finished, 2 failed``; what is rare only where it happened."""
    rare = {"discarded": counts.discarded, "handed back": counts.handed_back}
    parts = [f"{counts.running} runs under way"] if counts.running else []
    parts += [f"{counts.finished} runs finished", f"{counts.failed} of them failed"]
    return ", ".join(parts + [f"{n} {what}" for what, n in rare.items() if n])
