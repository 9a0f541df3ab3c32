"""``python -m tests.support.load_client``: many clients of a server, in a process of their own.

Reads one JSON object from standard input:

``port``, ``path``, ``body``  of each request, in which ``%`` stands for a number of its own
``clients``   connections, each with one request at a time
``pace``      requests a second of all clients; null: each as soon as the last was answered
``pause``     seconds after which a client that was refused (429, 503) asks again
``host``      address that they come from
``seconds``   for which they go on; or null, and ``requests``: how many in all

Writes one: ``statuses`` (status -> how often; ``lost``: no answer), ``without_retry_after``,
``seconds``, and ``added`` and ``latency``: medians and 99th percentiles in
ms. What is added is the time beyond the ``took S`` that the reply says.
"""

import asyncio
import itertools
import json
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import uvloop

_TOOK = re.compile(rb"took (\d+\.\d+)")
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass
class Load:
    port: int
    path: str
    body: str
    clients: int
    seconds: float | None = None
    requests: int | None = None
    pace: float | None = None
    pause: float = 0.05
    host: str = "127.0.0.1"
    statuses: Counter[str] = field(default_factory=Counter[str])
    without_retry_after: int = 0
    latencies: list[float] = field(default_factory=list[float])
    added: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._begun = time.monotonic()

    async def run(self) -> dict[str, Any]:
        await asyncio.gather(*map(self._client, range(self.clients)))
        return {
            "statuses": self.statuses,
            "without_retry_after": self.without_retry_after,
            "seconds": time.monotonic() - self._begun,
            "latency": _percentiles(self.latencies),
            "added": _percentiles(self.added),
        }

    async def _client(self, number: int) -> None:
        each = self.clients / self.pace if self.pace else 0.0
        due = self._begun + number * each / self.clients
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while (request := self._next(due)) is not None:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due += each
            begun = time.monotonic()
            try:
                if streams is None:
                    streams = await asyncio.open_connection(
                        "127.0.0.1", self.port, local_addr=(self.host, 0)
                    )
                streams[1].write(request)
                head = await streams[0].readuntil(b"\r\n\r\n")
                found = _LENGTH.search(head)
                assert found is not None, head
                content = await streams[0].readexactly(int(found[1]))
            except (OSError, asyncio.IncompleteReadError):
                self.statuses["lost"] += 1
                streams = None
                continue
            await self._answered(head, content, begun)
        if streams is not None:
            streams[1].close()

    def _next(self, due: float) -> bytes | None:
        number = next(self._numbers)
        ended = max(due, time.monotonic()) - self._begun >= (self.seconds or float("inf"))
        if ended or (self.requests is not None and number >= self.requests):
            return None
        body = self.body.replace("%", str(number)).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def _answered(self, head: bytes, content: bytes, begun: float) -> None:
        now, status = time.monotonic(), head.split(b" ", 2)[1].decode()
        self.statuses[status] += 1
        if status == "200":
            self.latencies.append(now - begun)
            if (took := _TOOK.search(content)) is not None:
                self.added.append(now - begun - float(took[1]))
        elif status in ("429", "503"):
            self.without_retry_after += b"retry-after" not in head.lower()
            await asyncio.sleep(self.pause)


def _percentiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    found = statistics.quantiles(values, n=100)
    return {"median": found[49] * 1000, "p99": found[98] * 1000}


if __name__ == "__main__":
    json.dump(uvloop.run(Load(**json.load(sys.stdin)).run()), sys.stdout)
