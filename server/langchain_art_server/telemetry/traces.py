"""Spans of requests and jobs, for OpenTelemetry. Off by default; then nothing of it is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_art.errors import ConfigError

if TYPE_CHECKING:
    from langchain_art_server.telemetry.otel_spans import OtelTraces


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
