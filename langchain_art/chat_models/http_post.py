"""HTTP POST over kept-alive connections: `http.client` in threads, aiohttp in event loops.

Both take less CPU for one request with a whole body than httpx does. A request is sent once; the
caller decides about retries. There is no support for proxies, redirects and streams: such calls go
through the OpenAI SDK.
"""

from __future__ import annotations

import asyncio
import atexit
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
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from threading import Lock
from typing import Any, TypeAlias, cast

import aiohttp

from langchain_art.chat_models.http_pools import KEEP_ALIVE, httpx

#: What `Connections.post` and `post_async` raise if there is no complete answer.
POST_ERRORS = (OSError, HTTPException, aiohttp.ClientError, httpx.DecodingError)

#: Seconds that an idle connection is kept: less than the five after which uvicorn closes it.
_IDLE_SECONDS = 4.0

_Server: TypeAlias = tuple[str, str, int]


@dataclass(frozen=True)
class Target:
    """Where and how to post: all of a request but its body. Time limits in seconds, None: none."""

    request: httpx.Request
    """Without a body."""
    headers: Mapping[str, str]
    """All but ``content-length``."""
    connect_timeout: float | None = None
    read_timeout: float | None = None
    """Without data from the server."""

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

    @cached_property
    def url(self) -> str:
        """The address."""
        return str(self.request.url)

    @cached_property
    def limits(self) -> aiohttp.ClientTimeout:
        """The time limits as aiohttp needs them."""
        return aiohttp.ClientTimeout(
            total=None, connect=self.connect_timeout, sock_read=self.read_timeout
        )

    def retry(self, retries_taken: int) -> Target:
        """The same, with the number of earlier attempts in a header, as the SDK sends it."""
        if retries_taken == 0:
            return self
        count = {"x-stainless-retry-count": str(retries_taken)}
        return replace(self, headers={**self.headers, **count})


@dataclass(frozen=True)
class Answer:
    """A whole answer. The SDK's `response` is made when it is asked for, or where it must decode.

    Raises:
        httpx.DecodingError: the body is not `encoded` as its headers say.
    """

    status: int
    raw_headers: Sequence[tuple[str, str]] | Sequence[tuple[bytes, bytes]]
    body: bytes
    request: httpx.Request
    encoded: bool

    def __post_init__(self) -> None:
        if self.encoded:
            _ = self.response

    @property
    def is_success(self) -> bool:
        """Whether it is neither a redirect nor an error."""
        return 200 <= self.status < 300

    @property
    def content(self) -> bytes:
        """The decoded body."""
        return self.response.content if self.encoded else self.body

    @cached_property
    def response(self) -> httpx.Response:
        """The answer as the SDK has it."""
        headers = httpx.Headers(cast(Any, self.raw_headers))
        return httpx.Response(self.status, headers=headers, content=self.body, request=self.request)


class Connections:
    """Idle connections of all threads, by server; the one that was used last is used first."""

    def __init__(self) -> None:
        self._clear()
        if hasattr(os, "register_at_fork"):  # parent and child must not share a connection
            os.register_at_fork(after_in_child=self._clear)

    def _clear(self) -> None:
        self._idle: dict[_Server, deque[tuple[float, HTTPConnection]]] = {}
        self._lock = Lock()

    def post(self, target: Target, body: bytes) -> Answer:
        """Sends one request and reads the whole answer.

        Raises:
            TimeoutError: a time limit has passed.
            OSError, HTTPException, httpx.DecodingError: there is no complete answer.
        """
        connection = self._take(target.server) or _connect(target)
        keep = False
        try:
            connection.sock.settimeout(target.read_timeout)
            with suppress(BrokenPipeError, ConnectionResetError):  # it may refuse without reading
                # In one system call, which takes as long as all else here.
                connection.sock.sendall(b"%b%d\r\n\r\n%b" % (target.head, len(body), body))
            answer = HTTPResponse(connection.sock, method="POST")
            answer.begin()
            ends_with_connection = answer.length is None and not answer.chunked
            content = answer.read()
            if ends_with_connection and not content:
                raise ConnectionError("the server closed the connection within the headers")
            # http.client takes 103 for the answer, and the answer itself then follows.
            keep = not answer.will_close and answer.status >= 200
        finally:
            if keep:
                self._put(target.server, connection)
            else:
                connection.close()
        encoded = answer.getheader("content-encoding") is not None
        return Answer(answer.status, answer.getheaders(), content, target.request, encoded)

    def _take(self, server: _Server) -> HTTPConnection | None:
        while True:
            with self._lock:
                idle = self._idle.get(server)
                if not idle:
                    return None
                since, connection = idle.pop()
            if time.monotonic() - since < _IDLE_SECONDS and not _is_readable(connection.sock):
                return connection
            connection.close()

    def _put(self, server: _Server, connection: HTTPConnection) -> None:
        now = time.monotonic()
        with self._lock:
            idle = self._idle.setdefault(server, deque())
            while idle and now - idle[0][0] > _IDLE_SECONDS:
                idle.popleft()[1].close()
            idle.append((now, connection))


def _connect(target: Target) -> HTTPConnection:
    scheme, host, port = target.server
    if scheme == "https":
        connection = HTTPSConnection(host, port, timeout=target.connect_timeout, context=_tls())
    else:
        connection = HTTPConnection(host, port, timeout=target.connect_timeout)
    connection.connect()
    for option in KEEP_ALIVE:
        connection.sock.setsockopt(*option)
    return connection


def _is_readable(sock: socket.socket) -> bool:
    """Whether an idle connection was closed by the server, or has data that belongs to nothing."""
    if not hasattr(select, "poll"):
        return bool(select.select([sock], [], [], 0)[0])
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


#: A connection belongs to the event loop that opened it.
_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}


async def post_async(target: Target, body: bytes) -> Answer:
    """As `Connections.post`, in the running event loop; aiohttp.ClientError for HTTPException."""
    session = _sessions.get(asyncio.get_running_loop()) or await _open_session()
    async with session.post(
        target.url,
        data=body,
        headers=target.headers,
        timeout=target.limits,
        allow_redirects=False,
        ssl=_tls() if target.request.url.scheme == "https" else True,
    ) as answer:
        content, encoded = await answer.read(), "content-encoding" in answer.headers
        return Answer(answer.status, answer.raw_headers, content, target.request, encoded)


class _Connector(aiohttp.TCPConnector):
    """Does not reuse a connection on which data came after its last answer.

    aiohttp would take that data for the next request's answer.
    """

    async def _get(self, key: Any, traces: Any) -> Any:
        while (connection := await super()._get(key, traces)) is not None:
            if connection.protocol is None or not connection.protocol.should_close:
                break
            connection.close()
        return connection


async def _open_session() -> aiohttp.ClientSession:
    connector = _Connector(
        limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=_keep_alive_socket
    )
    session = aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
    )
    _sessions[asyncio.get_running_loop()] = session
    for loop in [loop for loop in list(_sessions) if loop.is_closed()]:
        if (old := _sessions.pop(loop, None)) is not None:
            await old.close()
    return session


def _keep_alive_socket(address: Any) -> socket.socket:
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    for option in KEEP_ALIVE:
        sock.setsockopt(*option)
    return sock


@atexit.register
def _close_sessions() -> None:
    """Without it, aiohttp logs an error for each session when the interpreter ends."""
    for loop, session in list(_sessions.items()):
        if loop.is_closed():
            asyncio.run(session.close())
        elif not loop.is_running():
            loop.run_until_complete(session.close())
