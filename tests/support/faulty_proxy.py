"""A TCP proxy that is as bad as networks are: slow, cut off at any byte, closed on one side."""

import asyncio
import contextlib
import random
import socket
import threading
from collections import Counter
from typing import Self

#: What happens to a connection, and how often: its answers may be lost, or its requests torn.
FATES = {"none": 5, "slow": 2, "reset": 2, "torn request": 2, "lost answer": 2, "half-close": 1}
#: Bytes after which a connection is cut are drawn up to this.
_CUT = 1500


class FaultyProxy:
    """Passes connections on to `port`. `met` counts what happened to them."""

    def __init__(self, port: int, seed: int) -> None:
        self._target, self._draw = port, random.Random(seed)
        self.met: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        start = asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error: object) -> None:
        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fate = self._draw.choices(list(FATES), list(FATES.values()))[0]
        self.met[fate] += 1
        try:
            theirs, ours = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # it is being started
            writer.transport.abort()
            return
        cut = self._draw.randrange(1, _CUT)
        forth, back = (
            cut if fate in ("torn request", "reset") else None,
            cut // 4 if fate == "lost answer" else None,
        )
        ways = [self._copy(reader, ours, forth, fate), self._copy(theirs, writer, back, fate)]
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if fate == "half-close":  # the client has said all; the answer is still passed on
                await asyncio.wait(tasks, timeout=2)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for one in (writer, ours):
                if fate == "reset":
                    linger = b"\1\0\0\0\0\0\0\0"  # close sends RST
                    with contextlib.suppress(OSError):
                        one.get_extra_info("socket").setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, linger
                        )
                one.transport.abort() if fate == "reset" else one.close()

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, most: int | None, fate: str
    ) -> None:
        """Until the end, or for `most` bytes."""
        passed = 0
        with contextlib.suppress(OSError):
            while data := await source.read(512 if fate == "slow" else 65536):
                if fate == "slow":
                    await asyncio.sleep(self._draw.uniform(0, 0.03))
                if most is not None:
                    data = data[: most - passed]
                passed += len(data)
                sink.write(data)
                await sink.drain()
                if fate == "half-close" and not sink.is_closing():
                    with contextlib.suppress(OSError):
                        sink.write_eof()
                    return
                if most is not None and passed >= most:
                    return
