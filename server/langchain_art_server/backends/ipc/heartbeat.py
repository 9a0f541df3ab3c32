"""Heartbeat of an engine's process, by its answers to the parent's pings; lag of a loop.

Two things can be wrong. A *silent* process answers no ping: its reading thread does that, so it was
stopped, or something in it keeps the interpreter. A process that *hangs* answers, but the loop that
does its calls makes no turn while there are calls: a long prefill or training pass looks the same
for a while, so this takes a limit of its own.

Time is counted in the parent's ticks, not by a clock: a parent that was stopped itself, or that
another request kept busy, does not take its own delay for its child's.
"""

from __future__ import annotations

import asyncio
import time

TICK_SECONDS = 2.0  # seconds of one tick: a ping, unless one is without an answer
#: Ticks without an answer after which calls are said not to be answered, and after which the
#: process is ended: 20 s, within which a stopped one is noticed, and no single call into C takes.
_SLOW, _SILENT = 3, 10
#: The same before the process is ready: an import that reads gigabytes holds the interpreter.
_SILENT_AT_START = 150
_WINDOW = 60.0  # seconds after which a pause is forgotten, at the latest after twice as many
_EVERY = 0.05  # seconds between two looks at an event loop


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


class Heartbeat:
    """Watches one process. It hangs if calls run and its loop makes no turn for `hang_seconds`."""

    def __init__(self, hang_seconds: float) -> None:
        self._hang_seconds = hang_seconds
        self._unanswered = 0
        self._turns = -1
        self._without_turn = 0
        self.hangs = False

    @property
    def answers(self) -> bool:
        """True if the last ping was answered."""
        return not self._unanswered

    @property
    def problem(self) -> str | None:
        """Reason why calls may not be answered now; None: they are."""
        if self._unanswered < _SLOW:
            return None
        return f"its process has not answered for {self._unanswered * TICK_SECONDS:.0f} s"

    def answered(self, turns: int) -> None:
        """Take the answer to a ping: how many turns the process's loop has made."""
        self._unanswered = 0
        if turns != self._turns:
            self._turns, self._without_turn = turns, 0

    def tick(self, *, ready: bool, busy: bool) -> str | None:
        """Count a tick. Returns why the process is to be ended; None: it is not."""
        self._without_turn = self._without_turn + 1 if ready and busy else 0
        if self._without_turn * TICK_SECONDS > self._hang_seconds:
            self.hangs = True
            return f"did nothing for its calls for {self._hang_seconds:g} s"
        if self._unanswered >= (_SILENT if ready else _SILENT_AT_START):
            return f"has not answered for {self._unanswered * TICK_SECONDS:.0f} s"
        self._unanswered += 1
        return None
