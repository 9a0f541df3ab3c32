"""Queue of training jobs, one after the other; calls may wait while a step has the device."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from langchain_art.errors import ArtError, Conflict, EngineUnavailable
from langchain_art.wire import TrainJob
from langchain_art_server.storage.fleet import LeaseLost
from langchain_art_server.storage.job_store import JobCancelled, JobStore
from langchain_art_server.storage.rollout_queue import ChangeSignal, wait_for
from langchain_art_server.telemetry.metrics import JobWatch

log = logging.getLogger(__name__)
#: Pause before jobs go on after the store failed.
RETRY_SECONDS = 5.0
#: Pause between looks at whether jobs are held.
HELD_SECONDS = 0.5


@dataclass
class _Running:
    """The job that runs. It may be cancelled until its version is published.

    It is `lost` when another server has taken it over, or cancelled it.
    """

    id: str
    task: asyncio.Task[None]
    cancelled: bool = False
    publishing: bool = False
    lost: bool = False


class JobQueue(ABC):
    """Runs jobs one after the other, oldest first; `_run` does one.

    With a queue `beside` it, of another tenant, they take turns. `watch` is notified of each job.
    """

    def __init__(
        self, jobs: JobStore, beside: JobQueue | None = None, watch: JobWatch | None = None
    ) -> None:
        self._jobs, self.watch = jobs, watch or JobWatch()
        #: Whether no further job is begun, since the server ends.
        self.draining = False
        #: Whose turn it is among the queues of one learner: each has one job after the other.
        self._turn: asyncio.Lock = beside._turn if beside is not None else asyncio.Lock()
        self._news = asyncio.Event()
        self._changed = ChangeSignal()
        self._task: asyncio.Task[None] | None = None
        self._running: _Running | None = None
        self._choosing = asyncio.Lock()
        #: Whether no job is to begin now: there is no space for what it would make.
        self.is_held: Callable[[], bool] = lambda: False

    @abstractmethod
    async def _run(self, job: TrainJob) -> None:
        """Do a job and end it in the store."""

    @abstractmethod
    async def _failed(self, job: TrainJob, why: str, *, retryable: bool = False) -> None:
        """End a job that could not be done."""

    @abstractmethod
    async def _unpublish(self, job: TrainJob) -> None:
        """Delete the version that a job which has not ended may have published."""

    async def start(self) -> None:
        """Run the jobs that are not ended, and those that come."""
        self._task = asyncio.create_task(self._loop())
        self._news.set()

    async def close(self) -> None:
        """Stop. The next start resumes an unfinished job."""
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def wake(self) -> None:
        """Call this when a job was added."""
        self._news.set()

    async def cancel(self, job_id: str) -> TrainJob:
        """Cancel a job: it never runs, or its step is stopped and nothing is published. Idempotent.

        Raises:
            NotFound: there is no such job.
            Conflict: it has ended, or its version is being published.
        """
        async with self._choosing:
            running, waits = self._running, not (await self._jobs.get(job_id)).ended
            if running is not None and running.id == job_id:
                waits = False  # `_run_next` says that it has ended
                if running.publishing:
                    raise Conflict(f"Job {job_id!r} is publishing its version; wait for its end.")
                if not running.cancelled:
                    running.cancelled = True
                    running.task.cancel()
                await asyncio.wait({running.task})
            job = await self._jobs.cancel(job_id)
            if job.state == "cancelled" and job.base_version is not None:
                await self._unpublish(job)  # what a crash left
            if waits and job.ended:
                self.watch.ended(job)
        self._changed.notify()
        if job.state != "cancelled":
            raise Conflict(f"Job {job_id!r} has {job.state}; a job that has ended stays as it is.")
        return job

    async def look(self) -> None:
        """Another server has written: look for what there is to do, and to stop."""
        running = self._running
        if running is not None and (await self._jobs.get(running.id)).state == "cancelled":
            self._lose(running)
        self._news.set()
        self._changed.notify()

    def _lose(self, running: _Running) -> None:
        """Stop a job that is not this server's any more; what it is about to write is refused."""
        if not (running.lost or running.cancelled or running.publishing):
            running.lost = True
            running.task.cancel()

    async def wait(self, seconds: float) -> None:
        """Return when a job's state or events have changed, or after `seconds`."""
        await wait_for(self._changed.next(), seconds)

    async def _report(self, job: TrainJob, message: str, progress: float | None = None) -> None:
        await self._jobs.add_event(job.id, message, progress)
        self._changed.notify()

    async def _loop(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                while await self._take_turn():
                    self._changed.notify()
            except Exception:  # the disk is full, the database is gone
                log.exception("The store failed; jobs go on in %g s", RETRY_SECONDS)
                await asyncio.sleep(RETRY_SECONDS)
                self._news.set()

    async def _take_turn(self) -> bool:
        while self.is_held():
            await asyncio.sleep(HELD_SECONDS)
        async with self._turn:
            return await self._run_next()

    async def _run_next(self) -> bool:
        """Run the next job. False if there is none. Raises what the store raised."""
        async with self._choosing:
            if self.draining or (job := await self._jobs.next_open()) is None:
                return False
            task = asyncio.create_task(self._run_watched(job))
            running = self._running = _Running(job.id, task)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:  # the server shuts down
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            self._running = None
        if running.cancelled:
            await self._jobs.cancel(job.id)
        elif not task.cancelled() and (error := task.exception()):
            raise error
        # What another server has ended, it has counted.
        if not running.lost and (now := await self._jobs.get(job.id)).ended:
            self.watch.ended(now)
        return True

    async def _run_watched(self, job: TrainJob) -> None:
        running = self._running
        assert running is not None
        with self.watch.running(job):
            try:
                lose = lambda: self._lose(running)  # noqa: E731
                async with self._jobs.leases.hold_for(job.policy, job.id, lose) as held:
                    running.lost = not held
                    if held:
                        await self._run_held(job)
            except (LeaseLost, JobCancelled) as error:  # of what it has left, no row speaks
                running.lost = True
                log.warning("Job %s is left to another server: %s", job.id, error)

    async def _run_held(self, job: TrainJob) -> None:
        try:
            await self._run(job)
        except LeaseLost:
            raise
        except JobCancelled:
            await self._unpublish(job)
            raise
        except ArtError as error:
            log.error("Job %s failed: %s", job.id, error)
            retryable = isinstance(error, EngineUnavailable)
            await self._failed(job, f"{type(error).__name__}: {error}", retryable=retryable)
        except OSError as error:  # no space for the adapter
            log.exception("Job %s failed", job.id)
            await self._failed(job, f"{type(error).__name__}: {error}", retryable=True)
        except Exception as error:
            log.exception("Job %s failed", job.id)
            await self._failed(job, f"internal error: {error!r}")

    @property
    def running(self) -> str | None:
        """The id of the job that runs."""
        return self._running.id if self._running is not None else None

    @property
    def is_cancelled(self) -> bool:
        """True if the job that runs was cancelled, or is another server's by now."""
        running = self._running
        return running is not None and (running.cancelled or running.lost)

    def publishes(self) -> None:
        """Let the job no longer be cancelled. Raises what it was cancelled with."""
        if self._running is not None:
            if self.is_cancelled:
                raise asyncio.CancelledError
            self._running.publishing = True
        self.watch.enter("publish")

    def publishes_not_yet(self) -> None:
        """The job goes on after all, and can be cancelled."""
        if self._running is not None:
            self._running.publishing = False


class AdmissionGate:
    """Admits calls while it is open. While it is shut, up to `most_waiting` wait."""

    def __init__(self, most_waiting: int) -> None:
        self._most = most_waiting
        self._inside = 0
        self._waiting = 0
        self._shut_since: float | None = None
        self._usual: float | None = None  # seconds that it was shut the last time
        self._changed = ChangeSignal()

    @asynccontextmanager
    async def through(self, calls: int = 1) -> AsyncGenerator[None]:
        """A context for so many calls; entering it waits until the gate is open.

        Raises EngineUnavailable: it is shut, and no more may wait; with `retry_after`.
        """
        if self._shut_since is not None:
            await self._wait(calls, self._shut_since)
        self._inside += calls
        try:
            yield
        finally:
            self._inside -= calls
            if self._shut_since is not None:
                self._changed.notify()

    async def _wait(self, calls: int, since: float) -> None:
        if self._waiting + calls > self._most:
            left = (self._usual or 10.0) - (time.monotonic() - since)
            raise EngineUnavailable(
                f"A training step has the device, and {self._waiting} calls wait for it to end; "
                f"{self._most} may (max_waiting_calls). Retry later, or lower the client's "
                "concurrency.",
                retry_after=max(1.0, left),
            )
        self._waiting += calls
        try:
            while self._shut_since is not None:
                await self._changed.next().wait()
        finally:
            self._waiting -= calls

    @asynccontextmanager
    async def shut(self) -> AsyncGenerator[None]:
        """A context in which no calls are admitted; entering it waits for those that run."""
        begun = self._shut_since = time.monotonic()
        try:
            while self._inside:
                await self._changed.next().wait()
            yield
        finally:
            self._shut_since = None
            self._usual = time.monotonic() - begun
            self._changed.notify()
