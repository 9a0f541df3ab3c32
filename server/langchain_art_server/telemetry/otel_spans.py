"""Spans by OpenTelemetry's SDK, sent by OTLP over HTTP.

Where they are sent to, and as what, the standard variables of the environment say:
``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER`` and their like.
Names are OpenTelemetry's for HTTP and generative AI, and ``langchain_art.…`` otherwise. No prompt
and no reply is in a span.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextvars import Token

from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from langchain_art._version import __version__

Value = str | int | float | bool | list[str]
_PROPAGATED = ("traceparent", "tracestate")
#: Jobs that wait whose requests' spans are remembered, and seconds that the last spans get.
_MOST_JOBS, _CLOSE_SECONDS = 4096, 5.0
_UNNAMED = "unknown_service"


class OtelSpan:
    """A span that was begun. Each is ended once."""

    def __init__(self, span: Span, token: Token[Context] | None = None) -> None:
        self.span, self._token = span, token

    def end(
        self, attributes: Mapping[str, Value], *, name: str = "", error: str | None = None
    ) -> None:
        """End it, perhaps with another name; `error` says which, if it failed."""
        if name:
            self.span.update_name(name)
        self.span.set_attributes(dict(attributes))
        if error is not None:
            self.span.set_attribute("error.type", error)
            self.span.set_status(Status(StatusCode.ERROR))
        self.span.end()
        if self._token is not None:
            contexts.detach(self._token)


class OtelTraces:
    """Makes spans, and sends them."""

    def __init__(self) -> None:
        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes.get(SERVICE_NAME, _UNNAMED)).startswith(_UNNAMED):
            resource = resource.merge(Resource({SERVICE_NAME: "langchain-art"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("langchain_art_server", __version__)
        self._w3c = TraceContextTextMapPropagator()
        self._asked: OrderedDict[str, Context] = OrderedDict()

    def begin_request(self, method: str, headers: Mapping[bytes, bytes]) -> OtelSpan:
        """The span of a request, a child of the caller's (W3C ``traceparent``) if it has one.

        It is the current one until it is ended.
        """
        given = ((name, headers.get(name.encode())) for name in _PROPAGATED)
        carrier = {name: value.decode("latin-1") for name, value in given if value is not None}
        parent = self._w3c.extract(carrier, Context())
        span = self._tracer.start_span(method, parent, SpanKind.SERVER)
        return OtelSpan(span, contexts.attach(set_span_in_context(span)))

    def queued(self, job: str) -> None:
        """A job was queued by the request that is answered now: its span will be a child of it."""
        self._asked[job] = contexts.get_current()
        if len(self._asked) > _MOST_JOBS:
            self._asked.popitem(last=False)

    def begin_job(self, job: str, attributes: Mapping[str, Value]) -> OtelSpan:
        """The span of a job that runs."""
        parent = self._asked.pop(job, Context())
        return OtelSpan(self._tracer.start_span("train", parent, attributes=dict(attributes)))

    def begin_phase(self, of: OtelSpan, name: str) -> OtelSpan:
        """The span of a part of a job."""
        return OtelSpan(self._tracer.start_span(name, set_span_in_context(of.span)))

    async def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        # A daemon: a collector that does not answer keeps no server from ending.
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _CLOSE_SECONDS)
