"""An asynchronous HTTP client that outlives event loops.

One `ChatART` is used under many loops: repeated ``asyncio.run()``, tests, notebooks, threads with a
loop each. A connection belongs to the loop it was opened in, so each loop gets its own pool.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies, proxy_bypass

import openai

if TYPE_CHECKING or int(openai.__version__.split(".")[0]) < 3:
    import httpx
else:
    import httpx2 as httpx  # version 3 of the SDK is built on it, and takes no other's clients

#: The response class of the HTTP library that the installed SDK is built on.
Response = httpx.Response
#: Pools per loop and server, used in turn: a pool looks at each of its connections at each request.
_SHARES = 8
_KEPT_CONNECTIONS = 512 // _SHARES


class _PoolPerLoop(httpx.AsyncBaseTransport):
    """Sends each request through the pool of the running event loop."""

    def __init__(self) -> None:
        self._pools: dict[
            tuple[asyncio.AbstractEventLoop, bool, str | None, int], httpx.AsyncHTTPTransport
        ] = {}
        self._proxies: dict[tuple[str, str], str | None] = {}
        self._turns = count()
        self._lock = Lock()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._pool(request.url).handle_async_request(request)

    def _pool(self, url: httpx.URL) -> httpx.AsyncHTTPTransport:
        place = url.scheme, url.host
        if place not in self._proxies:
            self._proxies[place] = _proxy(*place)
        secure, proxy = url.scheme == "https", self._proxies[place]
        key = asyncio.get_running_loop(), secure, proxy, next(self._turns) % _SHARES
        pool = self._pools.get(key)
        if pool is None:
            pool = httpx.AsyncHTTPTransport(
                verify=secure,  # reading the certificates takes longer than a call
                proxy=proxy,
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=_KEPT_CONNECTIONS
                ),
            )
            with self._lock:
                # A connection holds its loop, so closed loops stay until they are looked for.
                for dead in [other for other in self._pools if other[0].is_closed()]:
                    del self._pools[dead]
                self._pools[key] = pool
        return pool

    async def aclose(self) -> None:
        """Closes the running loop's connections; the next request opens new ones."""
        loop = asyncio.get_running_loop()
        with self._lock:
            pools = [self._pools.pop(key) for key in list(self._pools) if key[0] is loop]
        for pool in pools:
            await pool.aclose()


class _Client(httpx.AsyncClient):
    """Shared by all models of the process, so closing it only lets go of connections."""

    async def aclose(self) -> None:
        await self._transport.aclose()


@lru_cache(maxsize=1)
def async_client() -> Any:
    """The process's client, of the HTTP library that the installed OpenAI SDK is built on.

    It keeps to the environment's proxies and has no time limit of its own: the SDK sets one per
    request.
    """
    return _Client(transport=_PoolPerLoop(), timeout=None)


def _proxy(scheme: str, host: str) -> str | None:
    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    return None if proxy is None or proxy_bypass(host) else proxy
