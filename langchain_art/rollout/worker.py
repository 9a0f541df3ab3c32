"""A rollout worker: leases rollouts from the server, runs them, and completes them.

It may be killed at any time: its leases end by the server's clock, and other workers run what it
had. What it completes after that is refused there, and discarded.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from langchain_art import errors, wire
from langchain_art.call_seeds import RunSeed, run_seed
from langchain_art.client.async_client import AsyncArtClient
from langchain_art.rollout.graph_rollout import is_remote
from langchain_art.rollout.runner import Rollout, RolloutWorker, words_of
from langchain_art.wire.identifiers import scenario_id

#: Seconds of a request that waits for work.
_HOLD = 20.0
#: Most rollouts of one worker at once.
MAX_CONCURRENCY = 500


@dataclass
class WorkerCounts:
    """Counts of a worker's results so far."""

    running: int = 0
    finished: int = 0
    """Completed with a trajectory."""
    failed: int = 0
    """Runs that raised, and attempts that ended with an error of the program."""
    discarded: int = 0
    """Runs whose lease had ended before they did."""
    handed_back: int = 0
    """Runs that were stopped at the end, for other workers."""
    first_error: str | None = None


class LeaseWorker:
    """Runs one rollout on scenarios that the server leases it, until it is stopped.

    Args:
        rollout: see `Rollout`.
        name: by which the rollout is put up (`scenarios.rollout_name`).
        client: of the server. Its `patience` is how long it waits for a server that is away.
        concurrency: most runs at once.
        lease_seconds: after which the server gives a rollout to others, if this does not renew it.
        say: called with what a person should know.

    Raises:
        ConfigError: a number is out of range, or the rollout is a `RemoteGraph`.
    """

    def __init__(
        self,
        rollout: Rollout,
        name: str,
        client: AsyncArtClient,
        *,
        concurrency: int = 64,
        lease_seconds: float = 60.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if not 1 <= concurrency <= MAX_CONCURRENCY:
            raise errors.ConfigError(
                f"got {concurrency=}, expected a number from 1 to {MAX_CONCURRENCY}"
            )
        if not 1 <= lease_seconds <= 3600:
            raise errors.ConfigError(f"got {lease_seconds=}, expected seconds from 1 to 3600")
        if is_remote(rollout):
            raise errors.ConfigError(
                "got a RemoteGraph for a worker, expected a rollout that runs in this process; "
                "pass it to `fit` without workers"
            )
        self.id = uuid.uuid4().hex
        self._name, self._client = name, client
        self._concurrency, self._seconds = concurrency, lease_seconds
        self._say: Callable[[str], None] = say or (lambda _: None)
        self._worker = RolloutWorker(
            rollout,
            concurrency,
            ready=client.ready,
            max_failed=math.inf,
            on_done=self._note,
            server=client.base_url,
            say=say,
        )
        self._worker.expect(1)
        self._held: set[str] = set()  # leases that are not completed
        self._running: dict[str, asyncio.Task[None]] = {}
        self._completing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._draining, self._drain_by = asyncio.Event(), 0.0
        self._counts = WorkerCounts()
        self._others: frozenset[str] = frozenset()

    @property
    def counts(self) -> WorkerCounts:
        """Counts of the worker's results so far."""
        first = self._worker.first_error
        return replace(self._counts, running=len(self._running), first_error=first)

    def drain(self, grace: float = 20.0) -> None:
        """Lease no more; finish what is finished within `grace` seconds, hand the rest back."""
        self._drain_by = time.monotonic() + grace
        self._draining.set()

    async def run(self) -> WorkerCounts:
        """Work until `drain` is called.

        Raises:
            ServerUnreachable: the server was away for longer than the client's patience.
            RequestRefused: it does not let this worker lease: the key, say.
        """
        beat = asyncio.create_task(self._beat())
        drained = asyncio.create_task(self._draining.wait())
        try:
            while not self._draining.is_set():
                self._changed.clear()
                work = asyncio.create_task(
                    self._lease() if self._free > 0 else self._changed.wait()
                )
                try:
                    await asyncio.wait({work, drained}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    work.cancel()  # what it has leased meanwhile is handed back at the end
                    await asyncio.wait({work})
                if not work.cancelled():
                    work.result()
            await self._finish()
        finally:
            for task in (beat, drained):
                task.cancel()
            await asyncio.gather(beat, drained, return_exceptions=True)
            await self._stop()
        return self.counts

    @property
    def _free(self) -> int:
        running = self._concurrency - len(self._running)
        # Where completions do not get through, no more is begun.
        return min(running, 2 * self._concurrency - len(self._held))

    async def _lease(self) -> None:
        asked = wire.LeaseRequest(
            worker=self.id,
            name=f"{platform.node()}:{os.getpid()}",
            rollout=self._name,
            slots=self._concurrency,
            free=self._free,
            holds=tuple(self._held),
            seconds=self._seconds,
            wait=_HOLD,
        )
        found = await self._client.lease_rollouts(asked)
        self._drop(found.lost)
        for lease in found.leases:
            self._held.add(lease.trajectory_id)
            task = asyncio.create_task(self._run(lease))
            self._running[lease.trajectory_id] = task
        others = frozenset(found.others) - {self._name}
        if not found.leases and others - self._others:
            self._say(f"Rollouts of {', '.join(sorted(others))} wait; this runs {self._name}.")
        self._others |= others

    async def _run(self, lease: wire.RolloutLease) -> None:
        """Run a lease; it is completed by a task of its own, so that its slot is free at once."""
        try:
            name = lease.name if lease.name is not None else scenario_id(lease.scenario)
            run_seed.set(None if lease.seed is None else RunSeed.of(lease.seed))
            run = await self._worker.run(lease.scenario, name)
            outcome = wire.AttemptOutcome(trajectory_id=lease.trajectory_id, trajectory=run)
        except Exception as error:  # noqa: BLE001 - what a run raises is in its trajectory
            outcome = _error(lease, error, fatal=isinstance(error, errors.ConfigError))
            self._counts.failed += 1
        except asyncio.CancelledError:
            self._held.discard(lease.trajectory_id)
            raise
        finally:
            self._running.pop(lease.trajectory_id, None)
            self._changed.set()
        task = asyncio.create_task(self._complete(lease, outcome))
        self._completing.add(task)
        task.add_done_callback(self._completing.discard)

    async def _complete(self, lease: wire.RolloutLease, outcome: wire.AttemptOutcome) -> None:
        try:
            try:
                await self._client.complete_rollout(lease.id, outcome)
            except (
                errors.Conflict,
                errors.NotFound,
                errors.AuthenticationFailed,
                errors.PermissionDenied,
            ):
                raise
            except errors.RequestRefused as error:  # a body that the server does not take, say
                await self._client.complete_rollout(lease.id, _error(lease, error))
                self._counts.failed += 1
        except errors.ArtError as error:
            self._counts.discarded += 1
            if not isinstance(error, errors.Conflict | errors.NotFound):
                self._say(f"A run of scenario {lease.name!r} is lost: {error}")
        else:
            self._counts.finished += outcome.trajectory is not None
        finally:
            self._held.discard(lease.trajectory_id)
            self._changed.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / 4)
            if not self._held:
                continue
            held = wire.LeasesHeld(worker=self.id, holds=tuple(self._held), seconds=self._seconds)
            try:
                self._drop((await self._client.renew_leases(held)).lost)
            except errors.ArtError as error:
                self._say(f"The leases could not be renewed: {error}")

    def _drop(self, lost: tuple[str, ...]) -> None:
        """Stop the runs whose leases have ended; what is being completed is refused there."""
        for one in lost:
            if (task := self._running.get(one)) is not None:
                self._counts.discarded += 1
                task.cancel()

    async def _finish(self) -> None:
        """Wait for what runs, but not for longer than `drain` allowed."""
        while self._running or self._completing:
            left = self._drain_by - time.monotonic()
            if left <= 0:
                break
            tasks = {*self._running.values(), *self._completing}
            await asyncio.wait(tasks, timeout=min(left, 0.5), return_when=asyncio.FIRST_COMPLETED)

    async def _stop(self) -> None:
        running = list(self._running.values())
        self._counts.handed_back += len(running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._worker.close()
        try:
            async with asyncio.timeout(5):
                await asyncio.gather(*self._completing)
                await self._client.return_leases(wire.LeasesReturned(worker=self.id, leaving=True))
        except (errors.ArtError, TimeoutError) as error:
            self._say(f"The leases could not be handed back; they end by themselves: {error}")

    def _note(self, run: object) -> None:
        if getattr(run, "status", None) == "failed":
            self._counts.failed += 1
            if self._counts.failed == 1:
                self._say(f"The first failed run: {self._worker.first_error}")


def _error(
    lease: wire.RolloutLease, error: Exception, *, fatal: bool = False
) -> wire.AttemptOutcome:
    return wire.AttemptOutcome(
        trajectory_id=lease.trajectory_id, error=words_of(error), fatal=fatal
    )
