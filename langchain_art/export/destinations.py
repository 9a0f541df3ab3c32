"""Destinations of runs: a Langfuse server, or any backend that takes OTLP over HTTP.

Spans go as OTLP's protobuf, by OpenTelemetry's own exporter, once; what failed is tried again by
whoever sends (`Sender`). Its variables hold: ``LANGFUSE_PUBLIC_KEY``, ``LANGFUSE_SECRET_KEY``,
``LANGFUSE_BASE_URL`` there, ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_HEADERS`` and its
others here.
"""

from __future__ import annotations

import base64
import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import httpx

from langchain_art.errors import ArtError, ConfigError
from langchain_art.export.attributes import scores_of
from langchain_art.export.langfuse_api import address, keys
from langchain_art.export.records import ExportBatch
from langchain_art.wire.redaction import Redactor

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

Where = Literal["langfuse", "otlp"]
LANGFUSE = "Langfuse"
#: Seconds that one request may take.
REQUEST = 10.0
#: Spans and scores of one request.
SPANS, SCORES = 512, 200
#: How the exporter says that it has not even tried.
_UNSENDABLE = ("Failed to encode", "Dropping span batch")


class NotSent(ArtError):
    """Not taken now. Later, it may be."""


class Closed(NotSent):
    """Keys or address are wrong: nothing else would be taken either."""


class Refused(ArtError):
    """This batch is never taken; others may be."""


def destination(where: Where) -> Destination:
    """The destination that the environment's variables configure.

    Raises:
        ConfigError: a variable is missing, or the package that sends is.
    """
    if where == "langfuse":
        return Langfuse()
    if where == "otlp":
        names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
        if not any(os.environ.get(name) for name in names):
            raise ConfigError(
                "got no OTEL_EXPORTER_OTLP_ENDPOINT, expected the address of an OpenTelemetry "
                "backend, such as http://localhost:6006 for Phoenix; its keys go into "
                "OTEL_EXPORTER_OTLP_HEADERS"
            )
        return Destination()
    raise ConfigError(f"got the destination {where!r}, expected 'langfuse' or 'otlp'")


class Destination:
    """A backend for OpenTelemetry's traces: Phoenix, MLflow, LangSmith, a collector.

    Sends batches, one call at a time, by OpenTelemetry's exporter. Its methods raise `NotSent`,
    `Closed` and `Refused`, with the reason why a request failed. Without an `endpoint` the
    variables say where spans go.
    """

    name = "OTLP"
    has_scores = False
    """True if it is sent scores; else they are with the spans."""

    def __init__(self, endpoint: str | None = None, headers: dict[str, str] | None = None) -> None:
        try:
            import requests  # noqa: PLC0415 - optional, as the next
            from opentelemetry.exporter.otlp.proto.http import Compression, trace_exporter  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                f"an export needs OpenTelemetry's exporter ({error}): "
                'pip install "langchain-art[langfuse]"'
            ) from error
        session = requests.Session()
        session.hooks["response"].append(self._note)
        self._reply: requests.Response | None = None
        ours = None if endpoint is None else Compression.Gzip
        self._exporter = trace_exporter.OTLPSpanExporter(
            endpoint, headers=headers, timeout=REQUEST, compression=ours, session=session
        )
        self._log = logging.getLogger(trace_exporter.__name__)
        self._quiet = _QuietThread()

    def send_spans(self, batch: ExportBatch, redactor: Redactor) -> None:
        """Send the spans of all runs."""
        from langchain_art.export.otel_spans import otel_spans  # noqa: PLC0415

        spans = [
            span
            for run in batch.runs
            for span in otel_spans(run, redactor, langfuse=self.has_scores)
        ]
        for start in range(0, len(spans), SPANS):
            self._post(spans[start : start + SPANS])

    def _post(self, spans: Sequence[ReadableSpan]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415

        self._reply = None
        self._quiet.first, self._quiet.thread = None, threading.get_ident()
        self._log.addFilter(self._quiet)
        try:
            result = self._exporter.export(spans)
        finally:
            self._log.removeFilter(self._quiet)
        reply = self._reply
        if reply is not None:
            _raise_for(reply.status_code, reply.text)
            if rejected := _rejected(reply.content):
                raise Refused(rejected)
        if result is not SpanExportResult.SUCCESS:
            why = self._quiet.first or "it does not answer"
            raise (Refused if why.startswith(_UNSENDABLE) else NotSent)(why)

    def _note(self, reply: Any, *args: Any, **kwargs: Any) -> None:
        self._reply = reply

    def send_scores(self, batch: ExportBatch, redactor: Redactor) -> None:
        """Send all scores, if it has any."""

    def close(self) -> None:
        """Let go of the connections; a request that waits is given up."""
        self._exporter.shutdown()


class Langfuse(Destination):
    """Langfuse Cloud, or a server of version 4.59 or later."""

    name = LANGFUSE
    has_scores = True

    def __init__(self) -> None:
        public, secret = keys()
        key = base64.b64encode(f"{public}:{secret}".encode()).decode()
        headers = {"Authorization": f"Basic {key}", "x-langfuse-ingestion-version": "4"}
        base = address().rstrip("/")
        super().__init__(f"{base}/api/public/otel/v1/traces", headers)
        self._scores = f"{base}/api/public/scores"
        self._http = httpx.Client(headers=headers, timeout=REQUEST)

    def send_scores(self, batch: ExportBatch, redactor: Redactor) -> None:
        """See `Destination`."""
        scores = scores_of(batch, redactor)
        rejected: list[str] = []
        for start in range(0, len(scores), SCORES):
            some = scores[start : start + SCORES]
            try:
                reply = self._http.post(self._scores, json=some)
            except (httpx.TransportError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and not self._http.is_closed:
                    raise
                raise NotSent(f"the scores: {type(error).__name__}: {error}") from error
            if reply.status_code == 400:
                raise Closed(
                    f"it refuses a list of scores ({reply.text[:200]}): this needs Langfuse Cloud, "
                    "or a server of version 4.59 or later"
                )
            _raise_for(reply.status_code, reply.text)
            if reply.status_code == 207:
                rejected += [str(one.get("message")) for one in reply.json().get("errors", ())]
        if rejected:
            raise Refused(f"{len(rejected)} of {len(scores)} scores: {rejected[0][:300]}")

    def close(self) -> None:
        """See `Destination`."""
        super().close()
        self._http.close()


class _QuietThread(logging.Filter):
    """Keeps the exporter's lines of one thread out of the log: what they say is said once, by us.

    The lines of a program's own exporter, from other threads, pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread: int | None = None
        self.first: str | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self.thread:
            return True
        if self.first is None:
            args = record.args if isinstance(record.args, tuple) else ()
            errors = [f"{type(one).__name__}: {one}" for one in args if isinstance(one, Exception)]
            self.first = (errors[0] if errors else record.getMessage())[:300]
        return False


def _rejected(body: bytes) -> str | None:
    """Message of a backend on what it did not keep of a request that it took."""
    from google.protobuf.message import DecodeError  # noqa: PLC0415
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse  # noqa: PLC0415

    reply = ExportTraceServiceResponse()
    try:
        reply.ParseFromString(body)
    except DecodeError:  # some answer with JSON, or with nothing of the kind
        return None
    partial = reply.partial_success
    if not partial.rejected_spans:
        return None
    return f"{partial.rejected_spans} spans: {partial.error_message}"


def _raise_for(status: int, text: str) -> None:
    if status < 400:
        return
    told = f"status {status}: {text[:200]}"
    if status in (401, 403, 404, 405):
        raise Closed(f"{told}. Look at its address and keys")
    if status in (408, 425, 429) or status >= 500:
        raise NotSent(told)
    raise Refused(told)
