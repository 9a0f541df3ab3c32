"""Gate of the calls: shut while a training step has the device."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from langchain_art.errors import EngineUnavailable
from langchain_art_server.storage.rollout_queue import ChangeSignal


class AdmissionGate:
    """Admits calls while it is open. While it is shut, up to `most_waiting` wait."""

    def __init__(self, most_waiting: int) -> None:
        self._most = most_waiting
        self._inside = 0
        self._waiting = 0
        self._shut_since: float | None = None
        self._usual: float | None = None  # seconds that it was shut the last time
        self._changed = ChangeSignal()

    @asynccontextmanager
    async def through(self, calls: int = 1) -> AsyncGenerator[None]:
        """A context for so many calls; entering it waits until the gate is open.

        Raises EngineUnavailable: it is shut, and no more may wait; with `retry_after`.
        """
        if self._shut_since is not None:
            await self._wait(calls, self._shut_since)
        self._inside += calls
        try:
            yield
        finally:
            self._inside -= calls
            if self._shut_since is not None:
                self._changed.notify()

    async def _wait(self, calls: int, since: float) -> None:
        if self._waiting + calls > self._most:
            left = (self._usual or 10.0) - (time.monotonic() - since)
            raise EngineUnavailable(
                f"A training step has the device, and {self._waiting} calls wait for it to end; "
                f"{self._most} may (max_waiting_calls). Retry later, or lower the client's "
                "concurrency.",
                retry_after=max(1.0, left),
            )
        self._waiting += calls
        try:
            while self._shut_since is not None:
                await self._changed.next().wait()
        finally:
            self._waiting -= calls

    @asynccontextmanager
    async def shut(self) -> AsyncGenerator[None]:
        """A context in which no calls are admitted; entering it waits for those that run."""
        begun = self._shut_since = time.monotonic()
        try:
            while self._inside:
                await self._changed.next().wait()
            yield
        finally:
            self._shut_since = None
            self._usual = time.monotonic() - begun
            self._changed.notify()
