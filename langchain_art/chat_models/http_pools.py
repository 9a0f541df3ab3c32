"""The OpenAI SDK's HTTP clients: connection pools that all models of the process share.

One `ChatART` is used in many event loops: repeated ``asyncio.run()``, tests, notebooks, one loop
per thread. A connection belongs to the loop that opened it, so each loop has pools of its own;
synchronous calls share one set of pools.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar
from urllib.request import getproxies, proxy_bypass

import openai

if TYPE_CHECKING or int(openai.__version__.split(".")[0]) >= 3:
    import httpx2 as httpx  # the HTTP library of version 3 of the SDK, which depends on it
else:
    import httpx

__all__ = ["KEEP_ALIVE", "async_client", "client", "httpx", "proxy"]

PoolT = TypeVar("PoolT")
_PoolKey: TypeAlias = tuple[asyncio.AbstractEventLoop | None, bool, str | None, int]

#: Pools per loop and server. A pool inspects all its connections at each request, so concurrent
#: requests are spread over several pools. Sequential requests stay in one, and reuse a connection.
_SHARDS = 8
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=512 // _SHARDS)
#: A call may wait while the server trains, but not for a host that is gone: after a minute without
#: traffic the kernel sends TCP keep-alive probes, and after a further minute it gives up.
KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
    if hasattr(socket, name)
]


class _Pools(Generic[PoolT]):
    """Connection pools by event loop, TLS and proxy."""

    def __init__(self, kind: Callable[..., PoolT]) -> None:
        self._kind = kind
        self._clear()
        if hasattr(os, "register_at_fork"):  # parent and child must not share a connection
            os.register_at_fork(after_in_child=self._clear)

    def _clear(self) -> None:
        self._pools: dict[_PoolKey, PoolT] = {}
        self._pending = 0  # requests that have no answer yet
        self._lock = Lock()

    @contextmanager
    def _pool(self, url: httpx.URL, loop: asyncio.AbstractEventLoop | None) -> Generator[PoolT]:
        secure, through = url.scheme == "https", proxy(url.scheme, url.host)
        with self._lock:
            key = loop, secure, through, self._pending % _SHARDS
            self._pending += 1
        try:
            yield self._pools.get(key) or self._add(key)
        finally:
            with self._lock:
                self._pending -= 1

    def _add(self, key: _PoolKey) -> PoolT:
        _, secure, through, _ = key
        pool = self._kind(verify=secure, proxy=through, limits=_LIMITS, socket_options=KEEP_ALIVE)
        with self._lock:
            # A pool keeps its loop alive, so pools of closed loops are removed here.
            for closed in [k for k in self._pools if k[0] is not None and k[0].is_closed()]:
                del self._pools[closed]
            return self._pools.setdefault(key, pool)


class _Transport(_Pools[httpx.HTTPTransport], httpx.BaseTransport):
    """Sends each request through a pool that all threads share."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with self._pool(request.url, None) as pool:
            return pool.handle_request(request)


class _AsyncTransport(_Pools[httpx.AsyncHTTPTransport], httpx.AsyncBaseTransport):
    """Sends each request through a pool of the running event loop."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        with self._pool(request.url, asyncio.get_running_loop()) as pool:
            return await pool.handle_async_request(request)

    async def aclose(self) -> None:
        """Closes the running loop's connections; the next request opens new ones."""
        loop = asyncio.get_running_loop()
        with self._lock:
            pools = [self._pools.pop(key) for key in list(self._pools) if key[0] is loop]
        for pool in pools:
            await pool.aclose()


class _Client(httpx.Client):
    """Stays open, because other models of the process may be using it."""

    def close(self) -> None:
        """Does nothing."""


class _AsyncClient(httpx.AsyncClient):
    """Stays open; closing it only closes the connections of the running loop."""

    async def aclose(self) -> None:
        await self._transport.aclose()


#: They use the environment's proxies. Time limits are per request, set by the SDK.
client = _Client(transport=_Transport(httpx.HTTPTransport), timeout=None, follow_redirects=True)
async_client = _AsyncClient(
    transport=_AsyncTransport(httpx.AsyncHTTPTransport), timeout=None, follow_redirects=True
)


@lru_cache(maxsize=256)
def proxy(scheme: str, host: str) -> str | None:
    """The environment's proxy for a server; the environment is read once per server."""
    proxies = getproxies()
    found = proxies.get(scheme) or proxies.get("all")
    return None if found is None or proxy_bypass(host) else found
