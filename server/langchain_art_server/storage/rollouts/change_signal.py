"""Wakes the requests of this process that wait for a change."""

from __future__ import annotations

import asyncio
import contextlib


class Bell:
    """Rung after each change; who waits has asked for `news` before looking, and misses none."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake all that wait, in the order in which they began to."""
        rung, self._rung = self._rung, asyncio.Event()
        rung.set()

    def news(self) -> asyncio.Event:
        """Event that the next `ring` sets."""
        return self._rung


async def heard(news: asyncio.Event, seconds: float) -> bool:
    """Wait for a bell so many seconds; True if it rang."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(news.wait(), seconds)
    return news.is_set()
