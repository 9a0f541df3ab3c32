"""HTTP clients that outlive event loops and threads, shared by all models of the process.

One `ChatART` is used under many loops: repeated ``asyncio.run()``, tests, notebooks, threads with a
loop each. A connection belongs to the loop it was opened in, so each loop gets its own pools; calls
without a loop share theirs.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar
from urllib.request import getproxies, proxy_bypass

import openai

if TYPE_CHECKING or int(openai.__version__.split(".")[0]) >= 3:
    import httpx2 as httpx  # version 3 of the SDK is built on it, and its errors are made of it
else:
    import httpx

__all__ = ["ALIVE", "Outcome", "async_client", "client", "httpx", "proxy", "told"]

#: How an attempt ended: with an answer that was read whole, or with what came instead of one.
Outcome: TypeAlias = httpx.Response | httpx.RequestError

Pool = TypeVar("Pool")
_Key: TypeAlias = tuple[asyncio.AbstractEventLoop | None, bool, str | None, int]

#: Pools per loop and server: a pool looks at each of its connections at each request, so many
#: requests at once are spread over several. One at a time keep to one, whose connection is open.
_SHARES = 8
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=512 // _SHARES)
#: A call may wait for as long as a server trains, but not for a machine that is gone: the kernel
#: asks an idle peer after a minute, and gives it up after another.
ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
    if hasattr(socket, name)
]

_told: ContextVar[Outcome | None] = ContextVar("langchain_art_told", default=None)


@contextmanager
def told(outcome: Outcome | None) -> Generator[None]:
    """Within it, the first request of these clients is not sent, but ends as `outcome` did.

    So whoever sends it (the SDK, with its retries and errors) goes on from an attempt that was made
    elsewhere. None changes nothing.
    """
    token = _told.set(outcome)
    try:
        yield
    finally:
        _told.reset(token)


class _Pools(ABC, Generic[Pool]):
    """Pools of connections by loop, kind of connection and proxy."""

    def __init__(self) -> None:
        self._pools: dict[_Key, Pool] = {}
        self._waiting = 0  # requests that have no answer yet
        self._lock = Lock()

    @abstractmethod
    def _open(self, *, verify: bool, proxy: str | None) -> Pool: ...

    @contextmanager
    def _pool(self, url: httpx.URL, loop: asyncio.AbstractEventLoop | None) -> Generator[Pool]:
        """The pool for a request, until it is answered."""
        secure, through = url.scheme == "https", proxy(url.scheme, url.host)
        with self._lock:
            key = loop, secure, through, self._waiting % _SHARES
            self._waiting += 1
        try:
            yield self._pools.get(key) or self._add(key, self._open(verify=secure, proxy=through))
        finally:
            with self._lock:
                self._waiting -= 1

    def _add(self, key: _Key, pool: Pool) -> Pool:
        with self._lock:
            # A connection holds its loop, so closed loops stay until they are looked for.
            for dead in [k for k in self._pools if k[0] is not None and k[0].is_closed()]:
                del self._pools[dead]
            return self._pools.setdefault(key, pool)


class _Transport(_Pools[httpx.HTTPTransport], httpx.BaseTransport):
    """Sends each request through a pool that all threads share."""

    def _open(self, *, verify: bool, proxy: str | None) -> httpx.HTTPTransport:
        return httpx.HTTPTransport(verify=verify, proxy=proxy, limits=_LIMITS, socket_options=ALIVE)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if (outcome := _take_told()) is not None:
            return outcome
        with self._pool(request.url, None) as pool:
            return pool.handle_request(request)


class _AsyncTransport(_Pools[httpx.AsyncHTTPTransport], httpx.AsyncBaseTransport):
    """Sends each request through a pool of the running event loop."""

    def _open(self, *, verify: bool, proxy: str | None) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(
            verify=verify, proxy=proxy, limits=_LIMITS, socket_options=ALIVE
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if (outcome := _take_told()) is not None:
            return outcome
        with self._pool(request.url, asyncio.get_running_loop()) as pool:
            return await pool.handle_async_request(request)

    async def aclose(self) -> None:
        """Closes the running loop's connections; the next request opens new ones."""
        loop = asyncio.get_running_loop()
        with self._lock:
            pools = [self._pools.pop(key) for key in list(self._pools) if key[0] is loop]
        for pool in pools:
            await pool.aclose()


def _take_told() -> httpx.Response | None:
    """What `told` says about the next request, once. Raises what it says was raised."""
    outcome = _told.get()
    if outcome is None:
        return None
    _told.set(None)
    if isinstance(outcome, httpx.RequestError):
        raise outcome
    return outcome


class _Client(httpx.Client):
    """Shared by all models of the process, whose calls may be on their way: it stays open."""

    def close(self) -> None:
        """Does nothing."""


class _AsyncClient(httpx.AsyncClient):
    """Shared by all models of the process, so closing it only lets go of a loop's connections."""

    async def aclose(self) -> None:
        await self._transport.aclose()


#: Of the HTTP library that the installed SDK is built on, for all models of the process. They keep
#: to the environment's proxies, and have no time limit: the SDK sets one per request.
client = _Client(transport=_Transport(), timeout=None, follow_redirects=True)
async_client = _AsyncClient(transport=_AsyncTransport(), timeout=None, follow_redirects=True)


@lru_cache(maxsize=256)
def proxy(scheme: str, host: str) -> str | None:
    """The environment's proxy for a server, as it was when it was first asked for."""
    proxies = getproxies()
    found = proxies.get(scheme) or proxies.get("all")
    return None if found is None or proxy_bypass(host) else found
