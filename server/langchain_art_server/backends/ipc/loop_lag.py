"""Lag of a loop, of the gateway or an engine: for how long it did not turn."""

from __future__ import annotations

import asyncio
import time

#: Seconds after which a pause is forgotten, at the latest after twice as many.
_WINDOW = 60.0
#: Seconds between two looks at an event loop.
_EVERY = 0.05


class LoopLag:
    """Lag of a loop: the longest of the pauses that were added in the last minute or two."""

    def __init__(self) -> None:
        self._until = time.monotonic() + _WINDOW
        self._now = self._before = 0.0

    def add(self, seconds: float) -> None:
        """Add a pause that ends now."""
        self._turn()
        self._now = max(self._now, seconds)

    @property
    def seconds(self) -> float:
        """The longest one; 0.0 if there was none."""
        self._turn()
        return max(self._now, self._before)

    def _turn(self) -> None:
        if (late := time.monotonic() - self._until) >= 0:
            self._before, self._now = (self._now if late < _WINDOW else 0.0), 0.0
            self._until += late + _WINDOW


async def watch_event_loop(lag: LoopLag) -> None:
    """Measure the running event loop's lag until the task is cancelled."""
    while True:
        begun = time.monotonic()
        await asyncio.sleep(_EVERY)
        lag.add(max(0.0, time.monotonic() - begun - _EVERY))
