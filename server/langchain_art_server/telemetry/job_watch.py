"""Telemetry of a training job while it runs: its phases, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from langchain_art.wire import TrainJob
from langchain_art.wire.api_keys import DEFAULT_TENANT
from langchain_art_server.telemetry.log_context import CURRENT, LogContext
from langchain_art_server.telemetry.metrics import Metrics


class JobWatch:
    """Watches one tenant's jobs, of which one runs at a time."""

    def __init__(self, metrics: Metrics | None = None, tenant: str = DEFAULT_TENANT) -> None:
        self._metrics, self._tenant = metrics or Metrics(), tenant
        self._phase: tuple[str, float] | None = None

    @contextmanager
    def running(self, job: TrainJob) -> Generator[None]:
        """A context in which a job runs, from its first phase, ``prepare``, to its last."""
        token = CURRENT.set(LogContext(tenant=self._tenant, policy=job.policy, job_id=job.id))
        self._begin("prepare")
        try:
            yield
        finally:
            self._leave()
            CURRENT.reset(token)

    def enter(self, phase: str) -> None:
        """The phase that ran is over, and another begins."""
        if self._phase is not None:
            self._leave()
            self._begin(phase)

    def ended(self, job: TrainJob) -> None:
        """A job has ended in the store."""
        self._metrics.job_ended(self._tenant, job)

    def _begin(self, phase: str) -> None:
        self._phase = phase, time.monotonic()

    def _leave(self) -> None:
        if self._phase is not None:
            phase, begun = self._phase
            self._metrics.phase_ended(self._tenant, phase, time.monotonic() - begun)
            self._phase = None
