"""``python -m benchmarks.gateways.client``: many callers at once, each on a connection of its own.

A caller sends its next request as soon as the answer to the last one is whole; so lean that the
client costs little beside the gateway. Reads one JSON object from standard input: ``port``,
``key`` (or null), ``callers`` (of each its requests, as path and body) and ``seconds`` for which
they go on, from the first request again after the last; null: once through them. Writes one:
``calls``, ``seconds`` and ``tokens``, those of the replies by their own account.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import uvloop

_SAID = re.compile(rb'"completion_tokens":\s*(\d+)')


class Caller(asyncio.Protocol):
    """One keep-alive connection: an answer, then the next request."""

    def __init__(self, requests: Iterator[bytes], until: float) -> None:
        self._requests, self._until = requests, until
        self._buffer = bytearray()
        self.calls = self.tokens = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it
        self._next()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        head = bytes(self._buffer[:end]).lower()
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        if len(self._buffer) < end + length:
            return
        if not head.startswith(b"http/1.1 200"):
            self.ended.set_exception(RuntimeError(bytes(self._buffer).decode()))
            return
        self.calls += 1
        self.tokens += sum(map(int, _SAID.findall(self._buffer, end)))
        self._buffer.clear()
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or RuntimeError("the server closed the connection"))

    def _next(self) -> None:
        request = next(self._requests, None) if time.monotonic() < self._until else None
        if request is None:
            self.ended.set_result(None)
        else:
            self._transport.write(request)


def raw(path: str, body: dict[str, Any], key: str | None) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    if key is not None:
        head += f"Authorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def load(
    port: int, callers: list[list[Any]], seconds: float | None, key: str | None
) -> dict[str, float]:
    requests = [[raw(path, body, key) for path, body in mine] for mine in callers]
    again = iter if seconds is None else itertools.cycle
    begun = time.monotonic()
    until = begun + (seconds or float("inf"))
    made: list[Caller] = []
    for mine in requests:
        made.append(Caller(again(mine), until))
        await asyncio.get_running_loop().create_connection(lambda: made[-1], "127.0.0.1", port)
    await asyncio.gather(*(caller.ended for caller in made))
    took = time.monotonic() - begun
    calls, tokens = sum(c.calls for c in made), sum(c.tokens for c in made)
    return {"calls": calls, "seconds": took, "tokens": tokens}


if __name__ == "__main__":
    print(json.dumps(uvloop.run(load(**json.load(sys.stdin)))))
