"""Whether calls go to the sampler at once, or wait while the learner has the device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from langchain_art.errors import EngineUnavailable


class AdmissionGate:
    """Calls go through while it is open; while it is shut they wait, but not too many of them.

    Args:
        most_waiting: calls that may wait at once.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most = most_waiting
        self._inside = 0
        self._waiting = 0
        self._shut_since: float | None = None
        self._usual: float | None = None  # seconds that it was shut the last time
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def through(self, calls: int = 1) -> AsyncGenerator[None]:
        """The time that so many calls take.

        Raises:
            EngineUnavailable: it is shut, and no more may wait; says when to come again.
        """
        if self._shut_since is not None:
            await self._wait(calls, self._shut_since)
        self._inside += calls
        try:
            yield
        finally:
            self._inside -= calls
            if self._shut_since is not None:
                async with self._changed:
                    self._changed.notify_all()

    async def _wait(self, calls: int, since: float) -> None:
        if self._waiting + calls > self._most:
            left = (self._usual or 10.0) - (time.monotonic() - since)
            raise EngineUnavailable(
                f"A training step has the device, and {self._waiting} calls wait for it to end; "
                f"{self._most} may (max_waiting_calls). Come again, or lower the client's "
                "concurrency.",
                retry_after=max(1.0, left),
            )
        self._waiting += calls
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._shut_since is None)
        finally:
            self._waiting -= calls

    @asynccontextmanager
    async def shut(self) -> AsyncGenerator[None]:
        """The time that nothing goes through; begins when what was inside is done."""
        begun = self._shut_since = time.monotonic()
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._inside == 0)
            yield
        finally:
            self._shut_since = None
            self._usual = time.monotonic() - begun
            async with self._changed:
                self._changed.notify_all()
