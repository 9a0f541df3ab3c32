"""Slots that the calls of several clients wait for, on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator

from langchain_art_server.backends.chat.fair_queue import FairQueue


class FairSlots:
    """`limit` slots. The next free one is for the client that has fewest.

    One client may have all of them. Further slots, `kept`, are for others, which then need not wait
    until one of its calls ends.
    """

    def __init__(self, limit: int, kept: int = 0) -> None:
        self._limit, self._kept = limit, kept
        self._held: Counter[str] = Counter()
        self._waiting: FairQueue[tuple[str, asyncio.Future[None]]] = FairQueue()

    @property
    def held(self) -> int:
        """Slots that are given out."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Calls that wait for one."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def one(self, client: str) -> AsyncGenerator[None]:
        """A slot, when it is this client's turn."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(client, (client, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._held -= Counter([client])
            self._waiting.drop(lambda one: one[1] is granted)
            self._grant()

    def _grant(self) -> None:
        """Give out the free slots."""
        while found := self._waiting.take(self._held, self._may_have_one()):
            client, granted = found
            if not granted.cancelled():
                self._held[client] += 1
                granted.set_result(None)

    def _may_have_one(self) -> set[str]:
        running = self._held.total()
        if running >= self._limit + self._kept:
            return set()
        return {c for c in self._waiting.clients if self._held[c] < self._limit}
