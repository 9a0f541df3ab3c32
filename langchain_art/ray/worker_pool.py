"""The workers of one fit or evaluation on a Ray cluster: started with it, and ended with it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import ray
import ray.util

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ConfigError
from langchain_art.ray import RayWorkers
from langchain_art.ray.placed_actors import ActorsUnavailable, PlacedActors, connect
from langchain_art.rollout.runner import Rollout, StopsAll
from langchain_art.rollout.scenarios import load
from langchain_art.rollout.worker import LeaseWorker

log = logging.getLogger(__name__)
#: Seconds after which what a lost node's worker had is given to others.
LEASE_SECONDS = 20.0


class RolloutActor:
    """Works on the rollout `name` as soon as it is there, so that Ray's restart of it is enough."""

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


#: Seconds between two looks at the workers, and within which each says that it is there.
_LOOK_SECONDS = 2.0
#: Seconds after which it is said again that one has no room.
_AGAIN = 60.0
#: Seconds in which a worker hands its leases back at the end.
_STOP_SECONDS = 10.0


@asynccontextmanager
async def worker_pool(
    chosen: RayWorkers,
    rollout: str,
    server: str,
    key: str | None,
    concurrency: int,
    warn: Callable[[str], None],
) -> AsyncGenerator[None, None]:
    """Workers that lease `rollout` from `server` as long as this is open.

    One that is lost comes back on another node; one without room is waited for, and `warn` gets
    what is missing.

    Raises:
        ConfigError: the cluster cannot be joined, or its nodes cannot reach the server's address.
    """
    stopping = threading.Event()
    workers = await asyncio.to_thread(_workers, chosen, rollout, server, key, concurrency)
    keeper = threading.Thread(
        target=_keep, args=(workers, stopping, warn), daemon=True, name="ray workers"
    )
    keeper.start()
    try:
        yield
    finally:
        stopping.set()
        await asyncio.to_thread(_end, workers, keeper)


def _workers(
    chosen: RayWorkers, rollout: str, server: str, key: str | None, concurrency: int
) -> list[PlacedActors]:
    connect(chosen.address)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    _check_reach(server, {node["NodeManagerAddress"] for node in nodes})
    able = [
        node
        for node in nodes
        if all(node["Resources"].get(name, 0) >= need for name, need in chosen.needs.items())
    ]
    arguments = (rollout, server, key, concurrency)
    return [
        PlacedActors(f"Worker {number}", RolloutActor, chosen.needs, *arguments)
        for number in range(chosen.count or max(1, len(able)))
    ]


def _check_reach(server: str, addresses: set[str]) -> None:
    loopback = urlsplit(server).hostname in ("localhost", "127.0.0.1", "::1")
    if loopback and addresses != {ray.util.get_node_ip_address()}:
        raise ConfigError(
            f"got the server {server} for workers on {len(addresses)} machines of a Ray cluster, "
            "which reach a loopback address nowhere but on their own; expected the server's "
            "address in the cluster's network, in base_url or ART_BASE_URL"
        )


def _keep(
    workers: list[PlacedActors], stopping: threading.Event, warn: Callable[[str], None]
) -> None:
    said: dict[str, float] = {}
    while not stopping.wait(_LOOK_SECONDS):
        for worker in workers:
            try:
                worker.wait(_LOOK_SECONDS)
            except ActorsUnavailable:
                if stopping.is_set() or worker.problem is None:
                    continue
                if time.monotonic() - said.get(worker.what, -_AGAIN) >= _AGAIN:
                    said[worker.what] = time.monotonic()
                    warn(f"{worker.problem}.")


def _end(workers: list[PlacedActors], keeper: threading.Thread) -> None:
    def end(worker: PlacedActors) -> None:
        with suppress(ActorsUnavailable):  # it is away, and has no lease for long
            worker.call("stop", _STOP_SECONDS, seconds=_STOP_SECONDS)
        worker.close()

    keeper.join()
    with ThreadPoolExecutor(len(workers)) as threads:
        list(threads.map(end, workers))
