"""Wakes the requests of this process that wait for a change."""

from __future__ import annotations

import asyncio
import contextlib


class ChangeSignal:
    """Set after each change; who waits has asked for `next` before looking, and misses none."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all that wait, in the order in which they began to."""
        current, self._next = self._next, asyncio.Event()
        current.set()

    def next(self) -> asyncio.Event:
        """Event that the next `notify` sets."""
        return self._next


async def wait_for(change: asyncio.Event, seconds: float) -> bool:
    """Wait for a change at most so many seconds; True if there was one."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(change.wait(), seconds)
    return change.is_set()
