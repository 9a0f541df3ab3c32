"""HTTP with deadlines: uvicorn's protocol, which has one for idle connections and no other.

A peer loses its connection if it sends no whole header, a body too slowly, or does not read its
answer. This holds before its key is read, and after. One that is answered before it has sent all
hears the answer: its connection is closed in stages.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from langchain_art.errors import EngineUnavailable, InvalidRequest, RequestRefused, RequestTimeout
from langchain_art_server.gateway.auth import network_of
from langchain_art_server.gateway.refusals import answer
from langchain_art_server.telemetry.log_context import request_id_of
from langchain_art_server.telemetry.metrics import Metrics

log = logging.getLogger(__name__)
#: Seconds for a whole header, for a whole body, and in which a peer reads `_LEAST_READ` bytes.
HEADER_SECONDS, BODY_SECONDS, READ_SECONDS = 10.0, 60.0, 30.0
_LEAST_READ = 16 << 10
#: Seconds for which a connection may be idle between two requests. Longer than clients keep theirs
#: (OpenAI's and httpx 5 s, aiohttp 15 s, load balancers 60 s) and than others are configured to: a
#: client cannot tell whether a request was served whose connection is closed at that moment.
IDLE_SECONDS = 75
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_KEPT = b"connection: keep-alive\r\nkeep-alive: timeout=%d\r\n\r\n" % (IDLE_SECONDS - 10)
#: What a peer may send after the answer to a request that it has not sent whole. It is not kept; of
#: all connections together, so many bytes a second are read: a socket has megabytes ready, and to
#: read them takes turns of the event loop from others.
_LINGER_BYTES, _LINGER_RATE = 512 << 20, 64 << 20
#: Seconds from the end of a deadline to what follows: a process that was stopped (Ctrl-Z, a
#: debugger, a frozen container) finds its timers over before it has read what came meanwhile.
_LOOK_AGAIN = 0.05
#: Bytes of a header with its first line, and of what comes between two bytes of a body and after
#: its last one; fields of a header, trailers included; and requests that a connection may send
#: ahead of their answers.
MAX_HEADER_BYTES, MAX_FIELDS, MAX_AHEAD = 64 << 10, 128, 16
MAX_CONNECTIONS = 4096
#: Open files that are left to the store, the engines and the adapters.
_OTHER_FILES = 256


def max_connections() -> int:
    """Limit of open connections: that of open files, which is raised as far as it can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, endless = MAX_CONNECTIONS + _OTHER_FILES, resource.RLIM_INFINITY
    if soft != endless and soft < wanted:
        soft = wanted if hard == endless else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft == endless else min(MAX_CONNECTIONS, soft - _OTHER_FILES)


class _Refused(Exception):
    """The header is not taken."""


class _Deadline:
    """A timer. It is over when what had come by then was read, and was not what it waits for."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, over: Callable[[], None]
    ) -> None:
        self._loop, self._over = loop, over
        self._timer = loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(_LOOK_AGAIN, self._over)

    def cancel(self) -> None:
        self._timer.cancel()


class _AnswerWriter:
    """Transport to which uvicorn writes one request's answer.

    To who speaks HTTP/1.0 (`is_old`), which has no chunks, the body goes without them.
    """

    __slots__ = ("_begun", "_connection", "_is_old", "_strips")

    def __init__(self, connection: DeadlineHttp, is_old: bool) -> None:
        self._connection, self._is_old = connection, is_old
        self._begun = self._strips = False

    def write(self, data: bytes) -> None:
        """The header, then parts of the body."""
        if self._begun:
            if self._strips and data:  # one chunk, and perhaps the last one
                size, _, rest = data.partition(b"\r\n")
                data = rest[: int(size, 16)]
            self._connection.write(data)
            return
        if data.startswith(b"HTTP/1.1 100 "):  # to who waits for it before it sends a body
            self._connection.write(data)
            return
        self._begun = True
        if self._is_old:
            self._strips = _CHUNKED in data
            data = data.replace(_CHUNKED, b"\r\n")
        elif b"\r\nconnection: close\r\n" not in data:
            data = data[:-2] + _KEPT
        self._connection.hold(data)

    def close(self) -> None:
        """The answer is whole, and no request follows."""
        self._connection.close()

    def is_closing(self) -> bool:
        """True if the connection takes nothing more."""
        return self._connection.transport.is_closing()


class DeadlineHttp(HttpToolsProtocol):
    """One connection. Timers run only while a header or a body is unfinished."""

    limit = MAX_CONNECTIONS
    #: Counts what is refused here.
    metrics = Metrics()
    #: When as much as `_LINGER_RATE` allows will have been read.
    _lingering_until = 0.0
    #: Open connections by the address they come from, the longest open first.
    _by_address: ClassVar[dict[str, dict[DeadlineHttp, None]]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._part = ""  # of a request that is unfinished: header, body or none
        self._without_body = 0  # bytes since the header's first, or since the last of a body
        self._deadline: _Deadline | None = None
        self._reading: _Deadline | None = None
        self._lingers = False  # the answer is sent, and what still comes is not kept
        self._after_answer = 0  # bytes of a body whose request was answered
        self._refusal: RequestRefused | None = None  # of what follows the requests before it
        self._held = b""  # a header that is not sent yet

    # --- connection -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A peer has connected."""
        super().connection_made(transport)
        self._address = network_of(self.client[0]) if self.client else ""
        own = self._by_address.setdefault(self._address, {})
        own[self] = None
        if len(self.connections) > self.limit and not self._room_beside(len(own)):
            self._lose()
        else:
            self._within(HEADER_SECONDS)

    def _room_beside(self, own: int) -> bool:
        """Close a connection of the address that has most; False: it is this one, or all work."""
        most = max(self._by_address.values(), key=len)
        if len(most) <= own or (one := next((c for c in most if c.is_idle()), None)) is None:
            return False
        del most[one]
        one._lose()
        return True

    def is_idle(self) -> bool:
        """True while no whole request is answered: it waits for one, or for the rest of one."""
        return self._lingers or self._part == "body" or self._answers_nothing()

    def _lose(self) -> None:
        """Close at once, since open files are few. Only a peer that asked something is told why."""
        if self._lingers:
            self.transport.abort()
            return
        if self._part or not self.headers:
            problem = f"{self.limit} connections are open, and no more may be. Keep fewer open."
            self._say(EngineUnavailable(problem, retry_after=5))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by whom ever."""
        self._in_time()
        self.resume_writing()
        own = self._by_address.get(self._address, {})
        own.pop(self, None)
        if not own:
            self._by_address.pop(self._address, None)
        super().connection_lost(exc)
        # A reference cycle that lived through two collections would stay for hours: thousands did.
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self.cycle = cast("RequestResponseCycle", None)

    def timeout_keep_alive_handler(self) -> None:
        """No new request came, as far as it was looked."""
        self.timeout_keep_alive_task = self.loop.call_later(_LOOK_AGAIN, self._idle)

    def _idle(self) -> None:
        """No new request came. What is left of an answer is given up if it is not read."""
        super().timeout_keep_alive_handler()
        self._end_soon()

    def hold(self, header: bytes) -> None:
        """Write a header with what follows at once: to send both takes half the time of two."""
        self._held = header
        self.loop.call_soon(self._release)

    def _release(self) -> None:
        if self._held:
            self.write(b"")

    def write(self, data: bytes) -> None:
        """Write a part of an answer, unless its end was already sent."""
        if self._held:
            data, self._held = self._held + data, b""
        if not self._lingers:
            self.transport.write(data)

    def close(self) -> None:
        """Close after an answer.

        In stages if the peer may still send (RFC 9112, 9.6): what comes to a closed connection
        resets it, and a reset may take away the answer that was not read yet.
        """
        self._release()
        if not self._part:
            self.transport.close()
        if self._lingers or self.transport.is_closing():
            return
        self._lingers = True
        self._end_soon()
        self.pipeline.clear()
        if (cycle := cast("RequestResponseCycle | None", self.cycle)) is not None:
            cycle.disconnected = True  # its application may wait for the rest of the body
            cycle.message_event.set()
        self.transport.write_eof()
        self.flow.resume_reading()

    def _end_soon(self) -> None:
        self._in_time()
        self._deadline = _Deadline(self.loop, READ_SECONDS, self.transport.abort)

    def shutdown(self) -> None:
        """The server ends."""
        if self._lingers:
            self.transport.abort()
        super().shutdown()

    # --- reading --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._lingers:
            self._not_kept(len(data))
            return
        if self._refusal is not None:
            self.flow.pause_reading()  # until an answer before it is whole
            return
        self._unset_keepalive_if_required()
        self._without_body += len(data)
        self._feed(data)
        if self._part == "body" and self._answers_nothing():
            self._not_kept(len(data))
        if self._refusal is not None:
            return
        if self._part:
            self._unfinished()
        elif self._answers_nothing():
            self._within(HEADER_SECONDS)  # empty lines before a header, which end uvicorn's timer

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Ignored (RFC 9110, 7.8): the parser, which takes what follows for another protocol's,
            # gives way to one that is told of no upgrade.
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
            lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._feed(b"\r\n".join([*lines, b"\r\n"]) + data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_message_begin(self) -> None:
        """A header begins."""
        super().on_message_begin()
        self._part, self._without_body, self._after_answer = "header", 0, 0

    def on_headers_complete(self) -> None:
        """A header is whole."""
        if len(self.headers) > MAX_FIELDS or len(self.pipeline) >= MAX_AHEAD:
            raise _Refused
        version, hosts = self.parser.get_http_version(), sum(n == b"host" for n, _ in self.headers)
        if version not in {"1.0", "1.1"} or hosts > 1 or (version == "1.1" and not hosts):
            raise _Refused  # RFC 9112, 3.2
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]) or self.parser.get_method() == b"CONNECT":
            raise _Refused  # RFC 9112, 6.1: another coding is not undone here
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._in_time()
        self._part = "body"
        is_old = self.scope["http_version"] == "1.0"
        self.cycle.transport = cast("asyncio.Transport", _AnswerWriter(self, is_old))

    def on_body(self, body: bytes) -> None:
        """A part of a body has come."""
        self._without_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        if self.parser.should_upgrade():
            return
        self._in_time()
        self._part = ""
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is whole."""
        super().on_response_complete()
        if self._refusal is not None:
            self._refuse(self._refusal)

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed."""
        self._refuse(
            InvalidRequest(
                f"{msg} Expected HTTP/1.1, with one field Host, no Transfer-Encoding but chunked, "
                f"at most {MAX_FIELDS} fields and {MAX_HEADER_BYTES} bytes of header, and at most "
                f"{MAX_AHEAD} requests that wait for their answers."
            )
        )

    def _unfinished(self) -> None:
        if self._without_body > MAX_HEADER_BYTES or len(self.headers) > MAX_FIELDS:
            self.send_400_response("The header is too large.")
        else:
            self._within(HEADER_SECONDS if self._part == "header" else BODY_SECONDS)

    def _not_kept(self, more: int) -> None:
        self._after_answer += more
        if (cycle := cast("RequestResponseCycle | None", self.cycle)) is not None:
            cycle.body = bytearray()  # what had come of it before the answer
        if self._after_answer > _LINGER_BYTES:
            self.transport.abort()
            return
        now = self.loop.time()
        until = max(now, DeadlineHttp._lingering_until) + more / _LINGER_RATE
        DeadlineHttp._lingering_until = until
        self.flow.pause_reading()
        self.loop.call_later(until - now, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    # --- writing --------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The peer does not read."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """The peer has read."""
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _expect_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reading = _Deadline(self.loop, READ_SECONDS, lambda: self._has_it_read(unread))

    def _has_it_read(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() <= unread - _LEAST_READ:
            self._expect_reading()  # of a large answer that was written at once
            return
        log.warning("%s has not read its answer for %g s and loses it.", self.client, READ_SECONDS)
        self.transport.abort()

    # --- deadlines ------------------------------------------------------------------------------

    def _within(self, seconds: float) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = _Deadline(self.loop, seconds, self._too_slow)

    def _in_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if not self._part:
            self.transport.close()  # it has not asked for anything
            return
        limit = HEADER_SECONDS if self._part == "header" else BODY_SECONDS
        problem = f"got no whole {self._part} within {limit:g} s."
        self._refuse(RequestTimeout(f"{problem} Send it again, in smaller parts if it is large."))

    def _answers_nothing(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is None or cycle.response_complete

    def _refuse(self, error: RequestRefused) -> None:
        """Answer without the application, behind what it answers already, and close."""
        self._in_time()
        if self._lingers or self.transport.is_closing():
            return
        if self._part != "body" and not self._answers_nothing():
            self._refusal = error
            return
        self._release()
        # The request of a body may have been answered, or wait for others.
        if self._part != "body" or not (self.cycle.response_started or self.pipeline):
            self._say(error)
        self.close()
        self._end_soon()

    def _say(self, error: RequestRefused) -> None:
        # Before the first request there are no headers, and no URL.
        path = self.url.decode("latin-1") if self.headers else ""
        headers: dict[bytes, bytes] = dict(self.headers or ())
        response, given_back = answer(error, path), request_id_of(headers.get(b"x-request-id"))
        self.metrics.refused("", error.status, error.code)
        log.debug("%s was refused (%s): %s", self.client, given_back, error)
        lines = [STATUS_LINE[response.status_code], b"connection: close\r\n"]
        lines.append(b"x-request-id: %b\r\n" % given_back.encode())
        lines += [b"%b: %b\r\n" % pair for pair in response.raw_headers]
        self.transport.write(b"".join([*lines, b"\r\n", bytes(response.body)]))
