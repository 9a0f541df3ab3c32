"""Connections that carry one whole request and answer after another, and stay open between them.

HTTP/1.1 (RFC 9112) as `h11` reads and writes it, for what most calls are: a body that is sent at
once, an answer that is wanted whole, no proxy between. A client for everything takes more CPU for
such a call than LangChain does. What is raised here are that client's errors, so whoever knows the
client knows what to make of them.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Generic, TypeAlias, TypeVar

import h11

from langchain_art.chat_models.http_pools import ALIVE, httpx

#: Seconds that an idle connection is kept: less than the five after which uvicorn closes it.
_KEPT = 4.0
_CHUNK = 65536

_Server: TypeAlias = tuple[str, str, int]
_Answer: TypeAlias = tuple[int, list[tuple[bytes, bytes]], bytes]
_Key: TypeAlias = tuple[asyncio.AbstractEventLoop | None, _Server]


@dataclass(frozen=True)
class Head:
    """A POST request without its body."""

    url: httpx.URL
    headers: Sequence[tuple[bytes, bytes]]
    """All but ``content-length``."""
    connect_timeout: float | None = None
    """Seconds; None waits as long as it takes."""
    read_timeout: float | None = None
    """Seconds without a word from the server; None waits as long as it takes."""

    @cached_property
    def server(self) -> _Server:
        """Scheme, host and port."""
        port = self.url.port or (443 if self.url.scheme == "https" else 80)
        return self.url.scheme, self.url.raw_host.decode("ascii"), port

    def response(self, answer: _Answer) -> httpx.Response:
        """What the client would have made of an answer. Raises DecodingError."""
        status, headers, content = answer
        return httpx.Response(status, headers=headers, content=content, request=self._request)

    @cached_property
    def _request(self) -> httpx.Request:
        return httpx.Request("POST", self.url)


class _Exchange:
    """What is said and heard on a connection, without the connection."""

    def __init__(self) -> None:
        self._parser = h11.Connection(h11.CLIENT)
        self._answer: h11.Response | None = None
        self._content: list[bytes] = []
        self.idle_since = 0.0

    def _say(self, head: Head, body: bytes) -> bytes:
        headers = [*head.headers, (b"content-length", b"%d" % len(body))]
        target = head.url.raw_path
        events: list[h11.Event] = [h11.Request(method=b"POST", target=target, headers=headers)]
        events += [h11.Data(data=body), h11.EndOfMessage()]
        return b"".join(self._parser.send(event) or b"" for event in events)

    def _hear(self, data: bytes) -> _Answer | None:
        """Takes what came, ``b""`` for the end; gives the answer once it is whole."""
        if not data and self._parser.their_state is h11.SEND_RESPONSE:
            raise ConnectionError("the server closed the connection without an answer")
        self._parser.receive_data(data)
        while not isinstance(event := self._parser.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                self._answer = event
            elif isinstance(event, h11.Data):
                self._content.append(event.data)
            elif event is h11.NEED_DATA:
                return None
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionError("the server closed the connection")
        answer, content = self._answer, b"".join(self._content)
        assert answer is not None  # h11 tells the end of no message that it did not tell before
        self._content.clear()
        return answer.status_code, answer.headers.raw_items(), content

    def can_go_on(self) -> bool:
        """Whether both sides are done and stay; if so, it is ready for the next request."""
        done = self._parser.our_state is h11.DONE and self._parser.their_state is h11.DONE
        if not done or self._parser.trailing_data != (b"", False):
            return False  # more was said than was asked: it would pass for the next answer
        self._parser.start_next_cycle()
        return True


class _Connection(_Exchange):
    """A connection that blocks its thread."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        scheme, host, port = head.server
        with _named(httpx.ConnectTimeout, httpx.ConnectError):
            self._socket = socket.create_connection((host, port), head.connect_timeout)
            try:
                _set_up(self._socket)
                if scheme == "https":
                    self._socket = _tls().wrap_socket(self._socket, server_hostname=host)
            except BaseException:
                self._socket.close()
                raise

    def ask(self, head: Head, body: bytes) -> _Answer:
        with _named(httpx.ReadTimeout, httpx.ReadError):
            self._socket.settimeout(head.read_timeout)
            with suppress(BrokenPipeError, ConnectionResetError):  # it may refuse without reading
                self._socket.sendall(self._say(head, body))
            while (answer := self._hear(self._socket.recv(_CHUNK))) is None:
                pass
            return answer

    @property
    def is_open(self) -> bool:
        """False once the server has closed it, or says what nobody asked."""
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return not poll.poll(0)
        return not select.select([self._socket], [], [], 0)[0]

    def close(self) -> None:
        self._socket.close()


class _AsyncConnection(_Exchange, asyncio.Protocol):
    """A connection of an event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._transport: asyncio.WriteTransport | None = None
        self._waiting: asyncio.Future[_Answer] | None = None
        self._limit: tuple[asyncio.Timeout, float] | None = None

    async def ask(self, head: Head, body: bytes) -> _Answer:
        with _named(httpx.ReadTimeout, httpx.ReadError):
            if self._transport is None:
                raise ConnectionError("the server closed the connection")
            self._waiting = asyncio.get_running_loop().create_future()
            self._transport.write(self._say(head, body))
            async with asyncio.timeout(head.read_timeout) as limit:
                self._limit = (limit, head.read_timeout) if head.read_timeout else None
                return await self._waiting

    @property
    def is_open(self) -> bool:
        """False once the server has closed it, or has said what nobody asked."""
        return self._transport is not None

    def can_go_on(self) -> bool:
        sent = self._transport is not None and self._transport.get_write_buffer_size() == 0
        return sent and super().can_go_on()

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        _set_up(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():
            self.close()
            return
        if self._limit is not None:
            limit, seconds = self._limit
            limit.reschedule(asyncio.get_running_loop().time() + seconds)
        try:
            answer = self._hear(data)
        except Exception as error:  # noqa: BLE001 - goes to who waits, and would reach nobody else
            self._waiting.set_exception(error)
            self.close()
        else:
            if answer is not None:
                self._waiting.set_result(answer)

    def eof_received(self) -> None:
        self.data_received(b"")
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(exc or ConnectionError("the server closed the connection"))


AnyConnection = TypeVar("AnyConnection", _Connection, _AsyncConnection)


class _Kept(ABC, Generic[AnyConnection]):
    """The connections that nobody uses at the moment, the newest last."""

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):  # two processes must not hear each other's answers
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._idle: dict[_Key, deque[AnyConnection]] = {}
        self._lock = Lock()

    @abstractmethod
    def _key(self, head: Head) -> _Key: ...

    def _take(self, head: Head) -> AnyConnection | None:
        key = self._key(head)
        while True:
            with self._lock:
                idle = self._idle.get(key)
                if not idle:
                    return None
                connection = idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since < _KEPT:
                return connection
            connection.close()

    def _keep(self, head: Head, connection: AnyConnection) -> None:
        key, connection.idle_since = self._key(head), time.monotonic()
        with self._lock:
            if key not in self._idle:
                # A connection holds its loop, so closed loops stay until they are looked for.
                gone = [k for k in self._idle if k[0] is not None and k[0].is_closed()]
                for dead in gone:
                    del self._idle[dead]
            idle = self._idle.setdefault(key, deque())
            while idle and connection.idle_since - idle[0].idle_since > _KEPT:
                idle.popleft().close()
            idle.append(connection)


class KeptConnections(_Kept[_Connection]):
    """For all threads."""

    def _key(self, head: Head) -> _Key:
        return None, head.server

    def post(self, head: Head, body: bytes) -> httpx.Response:
        """A request and its answer, read whole; nothing is tried twice.

        Raises:
            httpx.RequestError: there was no answer, or no whole one, or it cannot be decoded.
        """
        connection = self._take(head) or _Connection(head)
        kept = False
        try:
            answer = connection.ask(head, body)
            kept = connection.can_go_on()
        finally:
            if kept:
                self._keep(head, connection)
            else:
                connection.close()
        return head.response(answer)


class AsyncKeptConnections(_Kept[_AsyncConnection]):
    """For any number of event loops, to each its own."""

    def _key(self, head: Head) -> _Key:
        return asyncio.get_running_loop(), head.server

    async def post(self, head: Head, body: bytes) -> httpx.Response:
        """As `KeptConnections.post`."""
        connection = self._take(head) or await self._open(head)
        kept = False
        try:
            answer = await connection.ask(head, body)
            kept = connection.can_go_on()
        finally:
            if kept:
                self._keep(head, connection)
            else:
                connection.close()
        return head.response(answer)

    async def _open(self, head: Head) -> _AsyncConnection:
        scheme, host, port = head.server
        tls = _tls() if scheme == "https" else None
        with _named(httpx.ConnectTimeout, httpx.ConnectError):
            async with asyncio.timeout(head.connect_timeout):
                loop = asyncio.get_running_loop()
                return (await loop.create_connection(_AsyncConnection, host, port, ssl=tls))[1]


@contextmanager
def _named(
    late: type[httpx.TimeoutException], broken: type[httpx.TransportError]
) -> Generator[None]:
    """Errors of the operating system and of the protocol, by the HTTP client's names."""
    try:
        yield
    except TimeoutError as error:
        raise late(str(error)) from error
    except (OSError, h11.ProtocolError) as error:
        raise broken(str(error)) from error


def _set_up(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in ALIVE:
        connection.setsockopt(*option)


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
