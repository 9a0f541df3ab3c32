"""The actor that runs rollouts on a node: a `LeaseWorker`, from the actor's start to its end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ConfigError
from langchain_art.rollout.runner import Rollout, StopsAll
from langchain_art.rollout.scenarios import load
from langchain_art.rollout.worker import LeaseWorker

log = logging.getLogger(__name__)
#: Seconds after which what a lost node's worker had is given to others.
LEASE_SECONDS = 20.0


class RolloutActor:
    """Works as soon as it is there, so that Ray's restart of it is enough.

    Args:
        name: of the rollout, ``module:function``, which this node imports.
        server: its address, with ``/v1``, as this node reaches it.
        key: the server's; None: it has none.
        concurrency: most rollouts at once.
    """

    def __init__(self, name: str, server: str, key: str | None, concurrency: int) -> None:
        os.environ["ART_BASE_URL"] = server  # of the rollout's own ChatART
        if key is not None:
            os.environ["ART_API_KEY"] = key
        self._name, self._concurrency = name, concurrency
        self._loop = asyncio.new_event_loop()
        self._worker: LeaseWorker | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="leases")
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Hand all leases back and end, within `seconds`."""
        if self._worker is not None:
            self._loop.call_soon_threadsafe(self._worker.drain, 0.0)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._work())
        except Exception:  # whatever it is, Ray starts the actor again
            log.exception("The worker ends, and is started again.")
            os._exit(1)

    async def _work(self) -> None:
        rollout = _load(self._name)
        async with AsyncArtClient(patience=math.inf, on_wait=log.warning) as client:
            self._worker = LeaseWorker(
                rollout,
                self._name,
                client,
                concurrency=self._concurrency,
                lease_seconds=LEASE_SECONDS,
                say=log.warning,
            )
            await self._worker.run()


def _load(name: str) -> Rollout:
    """The rollout; one that ends the fit with the reason, if this node cannot import it."""
    try:
        return load(name)
    except ConfigError as error:
        why = f"On a node of the Ray cluster: {error}"

    def refuse(_scenario: object) -> float:
        raise StopsAll(why)

    return refuse
