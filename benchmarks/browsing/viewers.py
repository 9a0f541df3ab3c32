"""``python -m benchmarks.browsing.viewers PORT COUNT``: browsers that show a page, without drawing.

Each holds the page's stream of events, as a browser does: every second one shows the overview, the
others the first runs, and asks for that again when an event says that it has changed. Ends when its
standard input is closed, and writes one JSON object: ``events`` that came and ``answers`` to what
was asked, of all of them together.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress

import uvloop

#: What the page's views ask for, and the changes on which they ask again (`useLive`).
VIEWS: list[tuple[str, set[str]]] = [
    ("/page/overview", {"jobs", "event", "health", "runs"}),
    ("/page/runs", {"runs", "reviews", "jobs"}),
]


class Viewer:
    """One browser: a connection for the stream, one for what it asks."""

    def __init__(self, port: int, number: int) -> None:
        self._port = port
        self._path, self._kinds = VIEWS[number % len(VIEWS)]
        self._changed = asyncio.Event()
        self.events = self.answers = 0

    async def watch(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(_get("/page/events"))
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(status.decode())
        while line := await reader.readline():
            if line.startswith(b"data: {") and b"changed" in line:
                self.events += 1
                if self._kinds & set(json.loads(line[6:])["changed"]):
                    self._changed.set()
        raise RuntimeError("the stream has ended")

    async def ask(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        while True:
            writer.write(_get(self._path))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not head.startswith(b"http/1.1 200"):
                raise RuntimeError(head.decode())
            await reader.readexactly(int(head.split(b"content-length:", 1)[1].split(b"\r\n")[0]))
            self.answers += 1
            await self._changed.wait()
            self._changed.clear()


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


async def main(port: int, count: int) -> dict[str, int]:
    viewers = [Viewer(port, number) for number in range(count)]
    seen = asyncio.gather(*(part for one in viewers for part in (one.watch(), one.ask())))
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.wait({seen, ended}, return_when=asyncio.FIRST_COMPLETED)
    if seen.done():
        seen.result()
    seen.cancel()
    with suppress(asyncio.CancelledError):
        await seen
    counts = {"events": sum(v.events for v in viewers), "answers": sum(v.answers for v in viewers)}
    return counts


if __name__ == "__main__":
    print(json.dumps(uvloop.run(main(*map(int, sys.argv[1:])))))
