"""The end of a server in order: it takes no more, and what runs has until a deadline to end."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Generator

import uvicorn

from langchain_art_server.gateway.operations.request_watch import RequestWatch
from langchain_art_server.gateway.service import Service

log = logging.getLogger(__name__)
#: Seconds that answers have to leave when the calls were ended at the deadline.
_LEAVE_SECONDS = 1.0


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on SIGTERM, SIGINT, SIGHUP, or when it was idle for long.

    From the signal on, the server is not ready, and new requests get 503 with Retry-After. When the
    requests and the job that run have ended, or `drain_seconds` later, it ends. Calls that run
    then are ended with an error that says so; a job that runs is done again, from its beginning, by
    the next start. A second SIGINT is the deadline at once.

    Args:
        config: uvicorn's.
        service: the default tenant's.
        watch: counts the requests.
    """

    def __init__(self, config: uvicorn.Config, service: Service, watch: RequestWatch) -> None:
        super().__init__(config)
        self._service, self._requests = service, watch
        self._begun: float | None = None
        self._running = self._cut = 0
        self._jobs: list[str] = []
        #: The signals that have come.
        self.signals: set[int] = set()

    def handle_exit(self, sig: int, frame: object) -> None:
        """Begin to drain, or do not wait any more."""
        if not self.signals:  # long polls end from now on, before `_begin`
            self._running = self._requests.running
        self.signals.add(sig)
        super().handle_exit(sig, None)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Take the signals. They are not raised again: the service is to be closed after this.

        SIGHUP, of a terminal that is closed, only unless the caller ignores it (nohup).
        """
        taken = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            taken.append(signal.SIGHUP)
        before = {sig: signal.signal(sig, self.handle_exit) for sig in taken}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    async def on_tick(self, counter: int) -> bool:
        """True if the server is to end now; asked ten times a second."""
        if self._begun is None and self._has_been_idle():
            log.info(
                "No call and no job for %g s (stop_when_idle_seconds): the server ends.",
                self._service.settings.stop_when_idle_seconds,
            )
            self.should_exit = True
        if not await super().on_tick(counter):
            return False
        if self._begun is None:
            self._begin()
        if self._left() > 0 and (self._requests.running or self._jobs_that_run()):
            return False
        await self._end()
        return True

    def _has_been_idle(self) -> bool:
        if (limit := self._service.settings.stop_when_idle_seconds) is None:
            return False
        if self._jobs_that_run() or any(one.running_calls for one in self._service.tenants):
            self._requests.did_something = time.monotonic()
        return time.monotonic() - self._requests.did_something > limit

    def _begin(self) -> None:
        self._begun = time.monotonic()
        self._requests.draining = True
        self._service.health.drain()
        for one in self._service.tenants:
            one.jobs.draining = True
        self._running, jobs = max(self._running, self._requests.running), self._jobs_that_run()
        if self._running or jobs:
            log.info(
                "Shutting down: %d requests and %s have %g s to end.",
                self._running,
                f"the job {jobs[0]}" if jobs else "no job",
                self._service.settings.drain_seconds,
            )

    def _left(self) -> float:
        assert self._begun is not None
        until = self._begun + self._service.settings.drain_seconds
        return 0.0 if self.force_exit else max(0.0, until - time.monotonic())

    def _jobs_that_run(self) -> list[str]:
        return [job for one in self._service.tenants if (job := one.jobs.running) is not None]

    async def _end(self) -> None:
        """End what still runs: calls get EngineUnavailable from the sampler, which is closed."""
        self._cut, self._jobs = self._requests.running, self._jobs_that_run()
        if self._cut:
            for one in self._service.tenants:  # first: a job that asks the sampler would fail
                await one.jobs.close()
            await self._service.sampler.close()
        leave = max(self._left(), _LEAVE_SECONDS)
        self.config.timeout_graceful_shutdown = leave  # type: ignore[assignment]  # of wait_for
        self.force_exit = False  # uvicorn's own would not let the answers leave

    def summary(self) -> str:
        """Outcome of what ran, for the log; empty if the server did not drain."""
        if self._begun is None:
            return ""
        took = time.monotonic() - self._begun
        job = f" The job {self._jobs[0]} goes on at the next start." if self._jobs else ""
        return (
            f"Stopped after {took:.1f} s: {self._running - self._cut} running requests ended, "
            f"{self._cut} were cut, {self._requests.refused} new ones were refused.{job}"
        )
