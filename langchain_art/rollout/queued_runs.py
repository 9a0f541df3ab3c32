"""Runs that workers make: put up on the server, and taken when they are finished."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from typing import Any

from langchain_art.call_seeds import run_seed
from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ArtError, ConfigError, NotFound
from langchain_art.rollout.runner import RunSource
from langchain_art.rollout.scenarios import shown
from langchain_art.wire import BatchStatus, FinishedRollout, QueuedRollout, Trajectory

#: Rollouts that are put up at once.
_MOST = 10_000
#: Seconds of a request that waits, and of one while no worker is there.
_HOLD, _HOLD_ALONE = 20.0, 3.0
#: Seconds without a worker until it is said, and until it is said again.
_ALONE, _AGAIN = 2.0, 60.0
#: For which the end of a fit waits for a server that is away.
_CANCEL_SECONDS = 10.0


class QueuedRuns(RunSource):
    """Runs of one batch; `run` puts a scenario up and waits for its end.

    What an earlier process put up under the id `batch` is cancelled. `warn` is called with the
    message that no worker is there, and `advice`: what to do then (None: start workers).
    """

    concurrency = _MOST

    def __init__(
        self,
        client: AsyncArtClient,
        rollout: str,
        batch: str,
        *,
        max_failed: float = 0.5,
        on_done: Callable[[Trajectory], None] | None = None,
        warn: Callable[[str], None],
        advice: str | None = None,
    ) -> None:
        super().__init__(max_failed)
        self._advice = advice or (
            "On every machine that is to run them, where the module can be imported, type: "
            f"langchain-art worker {rollout} --server {client.base_url}"
        )
        self._client, self._rollout, self._batch = client, rollout, batch
        self._on_done, self._warn = on_done, warn
        self._prefix = uuid.uuid4().hex[:16]
        self._number = 0
        self._waiting: dict[str, tuple[QueuedRollout, asyncio.Future[FinishedRollout]]] = {}
        self._new: list[QueuedRollout] = []
        self._has_new = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None
        self._workers = 0
        self._alone_since: float | None = None
        self._said_at: float | None = None

    async def run(self, scenario: Any, name: str) -> Trajectory:
        """One run of one scenario, by whatever worker leases it.

        Raises:
            RolloutFailed: too many failed.
            ConfigError: the rollout's program is wrong, in words of the worker.
        """
        if self._failure is not None:
            raise self._failure
        if not self._tasks:
            self._tasks.append(asyncio.create_task(self._guarded(self._put_for_ever())))
        self._number += 1
        queued = QueuedRollout(
            id=f"{self._prefix}-{self._number}",
            scenario=scenario,
            name=name,
            seed=None if (seed := run_seed.get()) is None else seed.key,
        )
        future = asyncio.get_running_loop().create_future()
        self._waiting[queued.id] = queued, future
        self._new.append(queued)
        self._has_new.set()
        try:
            finished = await future
        finally:
            self._waiting.pop(queued.id, None)
        if finished.fatal:
            raise ConfigError(finished.error)
        self.retried += finished.attempt - 1
        found = _trajectory(finished, name)
        if found.status == "failed":
            self.count_failure(found.error or "no reason was given", shown(scenario, name))
        if self._on_done is not None:
            self._on_done(found)
        return found

    async def close(self) -> None:
        """Cancel what is not finished."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._tasks:
            return
        try:
            async with asyncio.timeout(_CANCEL_SECONDS):
                await self._cancel()
        except (ArtError, TimeoutError) as error:
            self._warn(
                f"The server was not told that nobody waits for rollouts of {self._rollout} any "
                f"more; it drops them in ten minutes ({type(error).__name__}: {error})."
            )

    async def _cancel(self) -> None:
        with contextlib.suppress(NotFound):
            await self._client.cancel_rollouts(self._batch)

    async def _put_for_ever(self) -> None:
        await self._cancel()
        while True:
            await self._has_new.wait()
            self._has_new.clear()
            await asyncio.sleep(0)  # the others of this turn of the loop come along
            new, self._new = self._new, []
            await self._client.put_rollouts(self._batch, self._rollout, new)
            if len(self._tasks) == 1:
                self._tasks.append(asyncio.create_task(self._guarded(self._take_for_ever())))

    async def _take_for_ever(self) -> None:
        done: list[str] = []
        while True:
            hold = _HOLD if self._workers else _HOLD_ALONE
            try:
                taken = await self._client.take_rollouts(self._batch, done, wait=hold)
            except NotFound:  # this process was stopped for longer than the server keeps a batch
                await asyncio.sleep(1)
                again = [queued for queued, _ in self._waiting.values()]
                await self._client.put_rollouts(self._batch, self._rollout, again)
                continue
            done = [one.id for one in taken.finished]
            for one in taken.finished:
                _, future = self._waiting.get(one.id, (None, None))
                if future is not None and not future.done():
                    future.set_result(one)
            self._look(taken.status)

    def _look(self, status: BatchStatus) -> None:
        """Warn that no worker runs anything, and say when one does again."""
        now, self._workers = time.monotonic(), status.workers
        if status.workers or not self._waiting:
            if status.workers and self._said_at is not None:
                some = "1 worker runs" if status.workers == 1 else f"{status.workers} workers run"
                self._warn(f"{some} {self._rollout} now.")
                self._said_at = None
            self._alone_since = None
            return
        self._alone_since = now if self._alone_since is None else self._alone_since
        said = self._said_at is not None and now - self._said_at < _AGAIN
        if now - self._alone_since >= _ALONE and not said:
            self._said_at = now
            self._warn(
                f"No worker runs {self._rollout}: {status.queued + status.leased} rollouts wait. "
                f"{self._advice}"
            )

    async def _guarded(self, work: Any) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - raised where runs are waited for
            self._failure = error
            for _, future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)


def _trajectory(finished: FinishedRollout, name: str) -> Trajectory:
    found = finished.trajectory
    if found is None:
        id_ = uuid.uuid4().hex  # of no attempt: all are discarded
        return Trajectory(id=id_, scenario=name, status="failed", error=finished.error)
    return found if found.scenario is not None else found.model_copy(update={"scenario": name})
