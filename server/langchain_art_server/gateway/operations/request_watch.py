"""The outermost layer of the application: telemetry of each request, and the end of taking any.

A request has an id (its own ``x-request-id`` or a new one), which its answer gives back and the
records of the log have; it is counted and, if that is asked for, traced. While the server drains,
new requests are refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from langchain_art.errors import EngineUnavailable
from langchain_art_server.gateway.auth import CHAT
from langchain_art_server.gateway.keys.scopes import template_of
from langchain_art_server.gateway.refusals import answer
from langchain_art_server.gateway.sessions import FILES
from langchain_art_server.telemetry.log_context import CURRENT, LogContext, request_id_of
from langchain_art_server.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from langchain_art_server.telemetry.otel_spans import OtelSpan, OtelTraces, Value

log = logging.getLogger("langchain_art_server.requests")
#: Of a request whose client left before its answer: no status of HTTP's, but a usual one in logs.
CLIENT_LEFT = 499
#: What is answered while the server drains; no line of the log is written for these.
PROBES = {"/healthz", "/readyz", "/metrics", "/status"}
#: Methods of requests that change nothing.
_READS = {"GET", "HEAD", "OPTIONS"}
#: Where workers ask for work again and again. If they get some, they do more than that.
_LEASE = "/v1/rollouts/lease"
#: Seconds after which a request that was refused for that may find another server.
RETRY_AFTER = 5


class RequestWatch:
    """ASGI middleware around all others.

    Args:
        app: what answers.
        metrics: counts requests.
        traces: None: no spans.
        log_requests: whether each request is a record of the log.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        traces: OtelTraces | None = None,
        *,
        log_requests: bool = False,
    ) -> None:
        self._app, self._metrics, self._traces = app, metrics, traces
        self._log_requests = log_requests
        #: Requests that are not answered yet, but for probes; those that were refused.
        self.running = self.refused = 0
        #: When a request last did something: none that only reads or asks for a lease, none that
        #: was refused.
        self.did_something = time.monotonic()
        #: Whether new requests are refused.
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, path = time.monotonic(), 0, scope["path"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        context = LogContext(request_id=request_id_of(headers.get(b"x-request-id")))
        assert context.request_id is not None
        given_back = (b"x-request-id", context.request_id.encode())

        async def begin(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), given_back]
            await send(message)

        traces = self._traces
        span = traces.begin_request(scope["method"], headers) if traces is not None else None
        token, counts = CURRENT.set(context), path not in PROBES
        self.running += counts
        try:
            if self.draining and counts:
                self.refused += 1
                problem = "The server is shutting down and takes no new requests."
                refusal = answer(EngineUnavailable(problem, retry_after=RETRY_AFTER))
                await refusal(scope, receive, begin)
            else:
                await self._app(scope, receive, begin)
        except asyncio.CancelledError:
            if not self.draining or status:
                raise
            problem = "The server shut down before the request was answered."
            await answer(EngineUnavailable(problem, retry_after=RETRY_AFTER))(scope, receive, begin)
        finally:
            self.running -= counts
            if scope["method"] not in _READS and path != _LEASE and 200 <= status < 400:
                self.did_something = time.monotonic()
            context.path_params = scope.get("path_params")
            route = self._tell(scope, status or CLIENT_LEFT, time.monotonic() - begun, context)
            CURRENT.reset(token)
            if span is not None:
                _end(span, scope["method"], route, status, context)

    def _tell(self, scope: Scope, status: int, seconds: float, context: LogContext) -> str:
        """Count a request, and write its record; returns the template of its path."""
        method, path = scope["method"], scope["path"]
        if path == CHAT:
            route = CHAT
        else:
            route = FILES + "{file}" if path.startswith(FILES) else template_of(path)
        self._metrics.answered(method, route, status, seconds)
        if context.refused is not None:
            self._metrics.refused(context.tenant or "", status, context.refused)
        if self._log_requests and (path not in PROBES or context.refused):
            fields = {"method": method, "route": route, "status": status}
            fields |= {"seconds": round(seconds, 6)}
            if context.finish_reasons:
                fields |= {"model": context.model, "input_tokens": context.input_tokens}
                fields |= {"output_tokens": context.output_tokens}
            if context.refused is not None:
                fields["code"] = context.refused
            log.info("%s %s %d", method, route or "?", status, extra={"fields": fields})
        return route


def _end(span: OtelSpan, method: str, route: str, status: int, context: LogContext) -> None:
    """End a request's span, with the attributes of OpenTelemetry's conventions."""
    about: dict[str, Value] = {"http.request.method": method, "http.route": route}
    if status:
        about["http.response.status_code"] = status
    about |= {f"langchain_art.{name}": value for name, value in context.fields().items()}
    if context.model is not None and context.policy is not None:
        about |= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "langchain_art",
            "gen_ai.request.model": context.policy,
            "gen_ai.response.model": context.model,
            "gen_ai.response.id": context.call_id or "",
            "gen_ai.response.finish_reasons": list(context.finish_reasons),
            "gen_ai.usage.input_tokens": context.input_tokens,
            "gen_ai.usage.output_tokens": context.output_tokens,
        }
    failed = context.refused or str(status) if status >= 500 or not status else None
    span.end(about, name=f"{method} {route}".strip(), error=failed)
