"""Spans of requests and jobs, for OpenTelemetry. Off by default; then nothing of it is imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol, cast

from langchain_art.errors import ConfigError

Value = str | int | float | bool | list[str]


class RunningSpan(Protocol):
    """A span that was begun. Each is ended once."""

    def end(
        self, attributes: Mapping[str, Value], *, name: str = "", error: str | None = None
    ) -> None:
        """End it, perhaps with another name; `error` says which, if it failed."""
        ...


class Traces(Protocol):
    """Makes spans, and sends them."""

    def begin_request(self, method: str, headers: Mapping[bytes, bytes]) -> RunningSpan:
        """The span of a request, a child of the caller's (W3C ``traceparent``) if it has one.

        It is the current one until it is ended.
        """
        ...

    def queued(self, job: str) -> None:
        """A job was queued by the request that is answered now: its span will be a child of it."""
        ...

    def begin_job(self, job: str, attributes: Mapping[str, Value]) -> RunningSpan:
        """The span of a job that runs."""
        ...

    def begin_phase(self, of: RunningSpan, name: str) -> RunningSpan:
        """The span of a part of a job."""
        ...

    async def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        ...


def open_traces(wanted: bool) -> Traces | None:
    """What makes spans; None if they are not `wanted`.

    Raises:
        ConfigError: OpenTelemetry's SDK is not installed.
    """
    if not wanted:
        return None
    try:
        made = importlib.import_module("langchain_art_server.telemetry.otel_spans").OtelTraces()
    except ModuleNotFoundError as missing:
        if not (missing.name or "").startswith("opentelemetry"):
            raise
        raise ConfigError(
            "got traces=true, and OpenTelemetry's SDK is not installed where the server runs; "
            'install it: pip install "langchain-art[otel]"'
        ) from missing
    return cast("Traces", made)
