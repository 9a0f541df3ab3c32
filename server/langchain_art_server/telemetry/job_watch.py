"""Telemetry of a training job while it runs: its phases, and how it ended; spans, if wanted."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from langchain_art.errors import ConfigError
from langchain_art.wire import TrainJob
from langchain_art.wire.api_keys import DEFAULT_TENANT
from langchain_art_server.telemetry.log_context import CURRENT, LogContext
from langchain_art_server.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from langchain_art_server.telemetry.otel_spans import OtelSpan, OtelTraces


class JobWatch:
    """Watches one tenant's jobs, of which one runs at a time."""

    def __init__(
        self,
        metrics: Metrics | None = None,
        tenant: str = DEFAULT_TENANT,
        traces: OtelTraces | None = None,
    ) -> None:
        self._metrics, self._tenant, self._traces = metrics or Metrics(), tenant, traces
        self._phase: tuple[str, float] | None = None
        self._span: OtelSpan | None = None
        self._phase_span: OtelSpan | None = None

    @contextmanager
    def running(self, job: TrainJob) -> Generator[None]:
        """A context in which a job runs, from its first phase, ``prepare``, to its last."""
        context = LogContext(tenant=self._tenant, policy=job.policy, job_id=job.id)
        token = CURRENT.set(context)
        if self._traces is not None:
            about = {f"langchain_art.{name}": value for name, value in context.fields().items()}
            self._span = self._traces.begin_job(job.id, about)
        self._begin("prepare")
        try:
            yield
        except BaseException:
            self._end_span("stopped", "stopped")
            raise
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
        self._end_span(job.state, None if job.state == "succeeded" else job.state)

    def _begin(self, phase: str) -> None:
        self._phase = phase, time.monotonic()
        if self._traces is not None and self._span is not None:
            self._phase_span = self._traces.begin_phase(self._span, phase)

    def _leave(self) -> None:
        if self._phase is not None:
            phase, begun = self._phase
            self._metrics.phase_ended(self._tenant, phase, time.monotonic() - begun)
            self._phase = None
        if self._phase_span is not None:
            self._phase_span.end({})
            self._phase_span = None

    def _end_span(self, state: str, error: str | None) -> None:
        if self._span is not None:
            self._leave()
            self._span.end({"langchain_art.job.state": state}, error=error)
            self._span = None


def open_traces(wanted: bool) -> OtelTraces | None:
    """Maker of spans; None if they are not `wanted`.

    Raises:
        ConfigError: OpenTelemetry's SDK is not installed.
    """
    if not wanted:
        return None
    try:
        from langchain_art_server.telemetry.otel_spans import OtelTraces  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        if not (missing.name or "").startswith("opentelemetry"):
            raise
        raise ConfigError(
            "got traces=true, and OpenTelemetry's SDK is not installed where the server runs; "
            'install it: pip install "langchain-art[otel]"'
        ) from missing
    return OtelTraces()
