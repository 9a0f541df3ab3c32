"""The outermost layer of the application: telemetry of each request, and when none is taken.

A request has an id (its own ``x-request-id`` or a new one), which its answer gives back and the
records of the log have, and is counted. While the server drains, new requests are refused. While it
loads its model, all are.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator, Generator

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from langchain_art.errors import ConfigError, EngineUnavailable
from langchain_art_server.gateway.auth import CALLS
from langchain_art_server.gateway.keys.scopes import template_of
from langchain_art_server.gateway.refusals import answer
from langchain_art_server.gateway.service import Service
from langchain_art_server.gateway.sessions import FILES
from langchain_art_server.telemetry.log_context import CURRENT, LogContext, request_id_of
from langchain_art_server.telemetry.metrics import Metrics

log = logging.getLogger("langchain_art_server.requests")
_log = logging.getLogger(__name__)
#: Of a request whose client left before its answer: no status of HTTP's, but a usual one in logs.
CLIENT_LEFT = 499
#: What is answered while the server drains; no line of the log is written for these.
PROBES = {"/healthz", "/readyz", "/metrics", "/status"}
#: Methods of requests that change nothing.
_READS = {"GET", "HEAD", "OPTIONS"}
#: Where workers ask for work again and again. If they get some, they do more than that.
_LEASE = "/v1/rollouts/lease"
#: Base URLs of runs begin with it.
_RUNS = "/v1/runs/"
#: Seconds after which a request that was refused for that may find another server.
RETRY_AFTER = 5
#: Seconds after which a client asks again whether the model is loaded.
_LOADED_AFTER = 2
#: Seconds that answers have to leave when the calls were ended at the deadline.
_LEAVE_SECONDS = 1.0


class RequestWatch:
    """ASGI middleware around all others; with `log_requests`, each is a record of the log."""

    def __init__(self, app: ASGIApp, metrics: Metrics, *, log_requests: bool = False) -> None:
        self._app, self._metrics = app, metrics
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
        if scope["path"].startswith(_RUNS):
            scope = _with_run(scope)
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

        async def refuse(problem: str) -> None:
            refusal = answer(EngineUnavailable(problem, retry_after=RETRY_AFTER), path)
            await refusal(scope, receive, begin)

        token, counts = CURRENT.set(context), path not in PROBES
        self.running += counts
        try:
            if self.draining and counts:
                self.refused += 1
                await refuse("The server is shutting down and takes no new requests.")
            else:
                await self._app(scope, receive, begin)
        except asyncio.CancelledError:
            if not self.draining or status:
                raise
            await refuse("The server shut down before the request was answered.")
        finally:
            self.running -= counts
            if scope["method"] not in _READS and path != _LEASE and 200 <= status < 400:
                self.did_something = time.monotonic()
            context.path_params = scope.get("path_params")
            self._tell(scope, status or CLIENT_LEFT, time.monotonic() - begun, context)
            CURRENT.reset(token)

    def _tell(self, scope: Scope, status: int, seconds: float, context: LogContext) -> None:
        """Count a request, and write its record."""
        method, path = scope["method"], scope["path"]
        if path in CALLS:
            route = path
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


def _with_run(scope: Scope) -> Scope:
    """The request of a client whose base URL names its run: ``/v1/runs/RUN`` and a call's path.

    Clients of Anthropic's add the ``/v1`` to the base URL, those of OpenAI's do not.
    """
    run, _, rest = scope["path"][len(_RUNS) :].partition("/")
    path = "/v1/" + rest.removeprefix("v1/")
    return {**scope, "path": path, "art.run": run} if run and path in CALLS else scope


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on SIGTERM, SIGINT, SIGHUP, or when it was idle for long.

    From the signal on, the server is not ready, and new requests get 503 with Retry-After. When the
    requests and the job that run have ended, or `drain_seconds` later, it ends. Calls that run
    then are ended with an error that says so; a job that runs is done again, from its beginning, by
    the next start. A second SIGINT is the deadline at once. `service` is the default tenant's.
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
            _log.info(
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
            _log.info(
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


async def is_loading(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application of a server that has no model yet. Probes too find it not started."""
    problem = "The server is loading its model. It answers when that is loaded."
    response = answer(EngineUnavailable(problem, retry_after=_LOADED_AFTER), scope["path"])
    response.headers["Connection"] = "close"  # what follows is for the application after this one
    await response(scope, receive, send)


@contextlib.asynccontextmanager
async def answer_while_loading(config: uvicorn.Config) -> AsyncGenerator[list[socket.socket]]:
    """Answer as `config` says during the context; yields the sockets, which listen on after it.

    Raises ConfigError: no socket can listen there.
    """
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()

    def connection() -> asyncio.Protocol:
        return config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]

    host, port = config.host, config.port
    try:
        server = await loop.create_server(connection, host, port, backlog=config.backlog)
    except socket.gaierror as error:
        raise ConfigError(
            f"got the host {host!r}, which is no address of this machine ({error.strerror}); "
            "expected 127.0.0.1, 0.0.0.0 or another address of it"
        ) from error
    except OSError as error:
        words = (
            f"cannot listen at {host}:{port}: another process listens there. Take another --port, "
            "or end that process; `langchain-art status` says whether it is a server of yours"
        )
        if error.errno != errno.EADDRINUSE:
            why = os.strerror(error.errno or 0)
            words = f"cannot listen at {host}:{port}: {why}. Take another --host or --port"
        raise ConfigError(words) from error
    sockets = [one.dup() for one in server.sockets]
    try:
        yield sockets
    except BaseException:
        for one in sockets:
            one.close()
        raise
    finally:
        server.close()
