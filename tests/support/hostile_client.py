"""``python -m tests.support.hostile_client PORT HOST SECONDS CONNECTIONS``: one hostile address.

All kinds at once, each again as soon as its connection is closed: connections that ask for
nothing, headers, bodies, trailers and chunk extensions without an end, answers that are not read,
requests sent ahead, tunnels, upgrades, no HTTP, wrong hosts, polls, large bodies, calls.
Writes one JSON object: how often a connection of each kind was begun.
"""

import asyncio
import json
import resource
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable

import uvloop

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = b"POST /v1/groups HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
Sends = Callable[[], AsyncIterator[bytes]]


def _post(path: str, body: bytes, size: int | None = None) -> bytes:
    length = len(body) if size is None else size
    return b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        HEAD,
        length,
        body,
    )


def _once(data: bytes) -> Sends:
    async def sends() -> AsyncIterator[bytes]:
        yield data

    return sends


def _endless(first: bytes, then: bytes, pause: float = 0.0) -> Sends:
    async def sends() -> AsyncIterator[bytes]:
        yield first
        while True:
            yield then
            await asyncio.sleep(pause)

    return sends


_CALL = b'{"model": "tiny", "messages": [{"role": "user", "content": "Say"}]}'
_UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
#: What a connection of each kind sends, and its share of the connections.
KINDS: dict[str, tuple[Sends, float]] = {
    "silent": (_once(b""), 0.5),
    "slow header": (_endless(GET + b"X-A: ", b"a", 1.0), 0.1),
    "slow body": (_endless(_post("/v1/groups", b"{", 1 << 20), b" ", 1.0), 0.1),
    "polls": (_once(_post("/v1/rollouts/batches/b/take", b'{"wait": 30}')), 0.2),
    "unread": (_once((b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n") * 2), 0.02),
    "calls": (_once(_post("/v1/chat/completions", _CALL)), 0.04),
    "trailer": (_endless(CHUNKED + b"0\r\nA: ", b"a" * 60_000), 0.0),
    "extension": (_endless(CHUNKED + b"1;a=", b"a" * 60_000), 0.0),
    "header": (_endless(GET + b"X-A: ", b"a" * 60_000), 0.0),
    "large": (_endless(_post("/v1/groups", b"{", 20 << 20), b" " * 60_000), 0.0),
    "ahead": (_once((GET + b"\r\n") * 5000), 0.0),
    "tunnel": (_once(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"), 0.0),
    "upgrade": (_once(GET + _UPGRADE + b"\r\n"), 0.0),
    "no HTTP": (_once(b"\x16\x03\x01\r\n\r\n"), 0.0),
    "host": (_once(GET.replace(b"localhost", b"evil.example") + b"\r\n"), 0.0),
    "path": (_once(GET.replace(b"/healthz", b"/page/static/" + b"a" * 300) + b"\r\n"), 0.0),
}


async def _again_and_again(
    port: int, host: str, sends: Sends, begun: Callable[[], None], reads: bool
) -> None:
    while True:
        begun()
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(host, 0), limit=1 << 14
            )
        except OSError:
            await asyncio.sleep(0.5)
            continue
        sending = asyncio.create_task(_send(writer, sends))
        try:
            while reads and await reader.read(1 << 14):
                pass
            await asyncio.wait([sending])
            if not reads:
                await asyncio.sleep(40.0)
        except OSError:
            pass
        finally:
            sending.cancel()
            writer.close()
        await asyncio.sleep(0.2)


async def _send(writer: asyncio.StreamWriter, sends: Sends) -> None:
    try:
        async for data in sends():
            writer.write(data)
            await writer.drain()
    except OSError:
        return


async def main(port: int, host: str, seconds: float, connections: int) -> None:
    """Go on for so many seconds."""
    begun = Counter[str]()
    tasks = [
        asyncio.create_task(
            _again_and_again(
                port, host, sends, lambda kind=kind: begun.update([kind]), kind != "unread"
            )
        )
        for kind, (sends, share) in KINDS.items()
        for _ in range(max(1, int(share * connections)))
    ]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    json.dump(begun, sys.stdout)


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])))
