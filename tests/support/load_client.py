"""``python -m tests.support.load_client``: many clients of a server, in a process of their own.

Reads one JSON object from standard input:

``port``, ``body``  of each request for a chat completion, in which ``%`` stands for its number
``clients``   connections, each with one request at a time
``seconds``   for which they go on
``between``   seconds between an answer and the next request
``pause``     seconds after which a client that was refused (429, 503) asks again
``host``      address that they come from

Writes one: ``statuses`` (status -> how often; ``lost``: no answer), ``without_retry_after``,
``seconds``, and ``latency``: the median and the 99th percentile in ms.
"""

import asyncio
import itertools
import json
import re
import statistics
import sys
import time
from collections import Counter
from typing import Any

import uvloop

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
)


async def load(
    port: int,
    body: str,
    clients: int,
    seconds: float,
    between: float = 0.0,
    pause: float = 0.05,
    host: str = "127.0.0.1",
) -> dict[str, Any]:
    numbers, statuses, latencies = itertools.count(), Counter[str](), list[float]()
    begun, silent = time.monotonic(), 0

    async def client(number: int) -> None:
        nonlocal silent
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        await asyncio.sleep(between * number / clients)
        while (sent := time.monotonic()) < begun + seconds:
            content = body.replace("%", str(next(numbers))).encode()
            try:
                if streams is None:
                    streams = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
                streams[1].write(_HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
                head = await streams[0].readuntil(b"\r\n\r\n")
                await streams[0].readexactly(int(_LENGTH.findall(head)[0]))
            except (OSError, asyncio.IncompleteReadError):
                statuses["lost"] += 1
                streams = None
                continue
            statuses[status := head.split(b" ", 2)[1].decode()] += 1
            if status == "200":
                latencies.append(1000 * (time.monotonic() - sent))
            elif status in ("429", "503"):
                silent += b"retry-after" not in head.lower()
                await asyncio.sleep(pause)
            await asyncio.sleep(between)
        if streams is not None:
            streams[1].close()

    await asyncio.gather(*map(client, range(clients)))
    parts = statistics.quantiles(latencies, n=100) if len(latencies) > 1 else [0.0] * 99
    return {
        "statuses": statuses,
        "without_retry_after": silent,
        "seconds": time.monotonic() - begun,
        "latency": {"median": parts[49], "p99": parts[98]},
    }


if __name__ == "__main__":
    json.dump(uvloop.run(load(**json.load(sys.stdin))), sys.stdout)
