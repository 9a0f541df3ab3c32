"""HTTP POST over kept-alive connections: one request with a whole body, and its whole answer.

That takes less CPU than `http.client`, aiohttp and httpx do. Answers are parsed as they arrive by
httptools (llhttp, Node.js's parser). A request is sent once; the caller
decides about retries. There is no support for proxies, redirects and streams: such calls go through
the OpenAI SDK.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from threading import Lock
from typing import Generic, TypeAlias, TypeVar, cast

import httptools

from langchain_art.chat_models.http_pools import KEEP_ALIVE, httpx

_Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class Answer:
    """A whole answer. The SDK's `response` is made when it is asked for, or where it must decode.

    Raises:
        httpx.DecodingError: the body is not `encoded` as its headers say.
    """

    status: int
    raw_headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    request: httpx.Request
    encoded: bool

    def __post_init__(self) -> None:
        if self.encoded:
            _ = self.response

    @property
    def is_success(self) -> bool:
        """True if it is neither a redirect nor an error."""
        return 200 <= self.status < 300

    @property
    def content(self) -> bytes:
        """The decoded body."""
        return self.response.content if self.encoded else self.body

    @cached_property
    def response(self) -> httpx.Response:
        """The answer as the SDK has it."""
        headers = httpx.Headers(self.raw_headers)
        return httpx.Response(self.status, headers=headers, content=self.body, request=self.request)


class AnswerParser:
    """Takes the bytes of one answer as they come; informational answers before it are dropped."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[_Header] = []
        self._parts: list[bytes] = []
        self._status: int | None = None
        self.is_complete = False
        self.keeps_connection = False
        """True if the connection may serve another request."""

    def feed(self, data: bytes) -> None:
        """Take what has arrived; nothing, if the connection was closed.

        Raises:
            ConnectionError: this is no HTTP, or the connection was closed before the answer's end.
        """
        if not data:
            named = {name.lower() for name, _ in self._headers}
            if self._status is None or named & {b"content-length", b"transfer-encoding"}:
                raise ConnectionError("the server closed the connection within its answer")
            self.is_complete = True  # the end of the connection is the end of such an answer
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.is_complete:
                raise ConnectionError(f"the answer is not HTTP: {error}") from error
            self.keeps_connection = False

    def answer(self, request: httpx.Request) -> Answer:
        """The complete answer to `request`; to be called once. Raises as `Answer`."""
        assert self._status is not None
        del self._parser  # it refers to this object
        encoded = any(name.lower() == b"content-encoding" for name, _ in self._headers)
        return Answer(self._status, self._headers, b"".join(self._parts), request, encoded)

    def on_message_begin(self) -> None:
        """Callback of httptools, as all below."""
        if self.is_complete:  # data that belongs to no request
            self.keeps_connection = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, or a trailer."""
        if not self.is_complete:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Keep the status."""
        if not self.is_complete:
            self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body."""
        if not self.is_complete:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """Be complete, or begin anew after an informational answer."""
        if self.is_complete:
            return
        if self._status is not None and self._status < 200:
            self._headers, self._status = [], None
        else:
            self.is_complete, self.keeps_connection = True, self._parser.should_keep_alive()


#: What `Connections.post` and `post_async` raise if there is no complete answer.
POST_ERRORS = (OSError, httpx.DecodingError)

#: Seconds that an idle connection is kept: less than the five after which uvicorn closes it.
_IDLE_SECONDS = 4.0

_Server: TypeAlias = tuple[str, str, int]


@dataclass(frozen=True)
class Target:
    """Destination and form of a request: all but its body. Time limits in seconds, None: none."""

    request: httpx.Request
    headers: Mapping[str, str]
    """All but ``content-length``."""
    connect_timeout: float | None = None
    read_timeout: float | None = None
    """Seconds without data from the server."""

    @cached_property
    def server(self) -> _Server:
        """Scheme, host and port."""
        url = self.request.url
        return url.scheme, url.raw_host.decode(), url.port or (443 if url.scheme == "https" else 80)

    @cached_property
    def head(self) -> bytes:
        """The request line and the headers; ``content-length`` and the body follow.

        Raises:
            ValueError: a header has a line break.
        """
        path = self.request.url.raw_path.decode()
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {one}" for name, one in self.headers.items())]
        for line in lines:
            if "\r" in line or "\n" in line:
                raise ValueError(f"got the header {line!r}, expected one line.")
        return "\r\n".join([*lines, "content-length: "]).encode("latin-1")

    def message(self, body: bytes) -> bytes:
        """The whole request. Sent in one system call, which takes as long as all else here."""
        return b"%b%d\r\n\r\n%b" % (self.head, len(body), body)

    def retry(self, retries_taken: int) -> Target:
        """The same, with the number of earlier attempts in a header, as the SDK sends it."""
        if retries_taken == 0:
            return self
        count = {"x-stainless-retry-count": str(retries_taken)}
        return replace(self, headers={**self.headers, **count})


ConnectionT = TypeVar("ConnectionT", "_BlockingConnection", "_AsyncConnection")


class _Idle(Generic[ConnectionT]):
    """Idle connections by server; the one that was used last is used first. Thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[_Server, deque[tuple[float, ConnectionT]]] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def take(self, server: _Server) -> ConnectionT | None:
        while True:
            with self._lock:
                kept = self._kept.get(server)
                if not kept:
                    return None
                since, connection = kept.pop()
            if time.monotonic() - since < _IDLE_SECONDS and connection.is_usable():
                return connection
            connection.close()

    def put(self, server: _Server, connection: ConnectionT) -> None:
        """Keep a connection, and close those that were kept for long."""
        with self._lock:
            self._kept.setdefault(server, deque()).append((time.monotonic(), connection))
        self.close_old(server)

    def close_old(self, *servers: _Server) -> None:
        """Close the connections, of all servers if none is named, that were kept for long."""
        now = time.monotonic()
        with self._lock:
            for server in servers or list(self._kept):
                kept = self._kept[server]
                while kept and now - kept[0][0] >= _IDLE_SECONDS:
                    kept.popleft()[1].close()


class _BlockingConnection:
    def __init__(self, target: Target) -> None:
        scheme, host, port = target.server
        self._socket = socket.create_connection((host, port), target.connect_timeout)
        try:
            for option in (*KEEP_ALIVE, (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)):
                self._socket.setsockopt(*option)
            if scheme == "https":
                self._socket = _tls().wrap_socket(self._socket, server_hostname=host)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def is_usable(self) -> bool:
        """True if it is open, without data on it that belongs to no request."""
        decrypted = self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) else 0
        return not decrypted and not _is_readable(self._socket)

    def post(self, target: Target, body: bytes) -> AnswerParser:
        self._socket.settimeout(target.read_timeout)
        with suppress(BrokenPipeError, ConnectionResetError):  # it may refuse without reading
            self._socket.sendall(target.message(body))
        answer = AnswerParser()
        while not answer.is_complete:
            answer.feed(self._socket.recv(1 << 16))
        return answer


class Connections:
    """Idle connections of all threads."""

    def __init__(self) -> None:
        self._clear()
        if hasattr(os, "register_at_fork"):  # parent and child must not share a connection
            os.register_at_fork(after_in_child=self._clear)

    def _clear(self) -> None:
        self._idle: _Idle[_BlockingConnection] = _Idle()

    def post(self, target: Target, body: bytes) -> Answer:
        """Sends one request and reads the whole answer.

        Raises:
            TimeoutError: a time limit has passed.
            OSError, httpx.DecodingError: there is no complete answer.
        """
        connection = self._idle.take(target.server) or _BlockingConnection(target)
        keep = False
        try:
            answer = connection.post(target, body)
            keep = answer.keeps_connection
        finally:
            if keep:
                self._idle.put(target.server, connection)
            else:
                connection.close()
        return answer.answer(target.request)


class _AsyncConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self._answer = AnswerParser()
        self._waiter: asyncio.Future[None] | None = None
        self._patience: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._socket: socket.socket = transport.get_extra_info("socket")
        for option in KEEP_ALIVE:
            self._socket.setsockopt(*option)

    def close(self) -> None:
        self._transport.abort()

    def is_usable(self) -> bool:
        return not (self._transport.is_closing() or _is_readable(self._socket))

    async def post(self, target: Target, body: bytes) -> AnswerParser:
        self._answer, self._waiter = AnswerParser(), asyncio.get_running_loop().create_future()
        self._patience, self._silence = target.read_timeout, asyncio.timeout(target.read_timeout)
        try:
            async with self._silence:
                self._transport.write(target.message(body))
                await self._waiter
        except TimeoutError as error:
            if self._silence.expired():
                raise TimeoutError(f"the server said nothing for {self._patience:g} s") from error
            raise
        finally:
            self._waiter = None
        return self._answer

    def _end(self, error: Exception | None = None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():  # unasked
            self.close()
            return
        if self._patience is not None:
            self._silence.reschedule(asyncio.get_running_loop().time() + self._patience)
        try:
            self._answer.feed(data)
        except ConnectionError as error:
            self._end(error)
        else:
            if self._answer.is_complete:
                self._end()

    def eof_received(self) -> None:
        self.data_received(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("the server closed the connection"))


class _LoopConnections:
    """Idle connections of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.idle: _Idle[_AsyncConnection] = _Idle()
        self._loop = loop
        self._closes_old = False

    def put(self, server: _Server, connection: _AsyncConnection) -> None:
        self.idle.put(server, connection)
        if not self._closes_old:
            self._closes_old = True
            self._loop.call_later(_IDLE_SECONDS, self._close_old)

    def _close_old(self) -> None:
        self.idle.close_old()
        self._closes_old = len(self.idle) > 0
        if self._closes_old:
            self._loop.call_later(_IDLE_SECONDS, self._close_old)


#: A connection belongs to the event loop that opened it.
_loops: dict[asyncio.AbstractEventLoop, _LoopConnections] = {}


async def post_async(target: Target, body: bytes) -> Answer:
    """Asynchronous counterpart of `Connections.post`, in the running event loop."""
    loop = asyncio.get_running_loop()
    if (kept := _loops.get(loop)) is None:
        for closed in [one for one in list(_loops) if one.is_closed()]:
            _loops.pop(closed, None)
        kept = _loops.setdefault(loop, _LoopConnections(loop))
    connection = kept.idle.take(target.server) or await _open(target)
    keep = False
    try:
        answer = await connection.post(target, body)
        keep = answer.keeps_connection
    finally:
        if keep:
            kept.put(target.server, connection)
        else:
            connection.close()
    return answer.answer(target.request)


async def _open(target: Target) -> _AsyncConnection:
    scheme, host, port = target.server
    async with asyncio.timeout(target.connect_timeout):
        _, connection = await asyncio.get_running_loop().create_connection(
            _AsyncConnection, host, port, ssl=_tls() if scheme == "https" else None
        )
    return connection


def _is_readable(sock: socket.socket) -> bool:
    """True if an idle connection was closed by the server, or has data that belongs to nothing."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
