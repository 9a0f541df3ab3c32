"""All trackers of one fit together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from langchain_art.trackers.base import AdapterFiles, FitCard, TrackedRecord, Tracker
from langchain_art.trackers.tracker_thread import TrackerThread

#: Seconds that the end of a fit waits for its trackers.
PATIENCE = 60.0


class FitTrackers:
    """Hands records to each tracker; none of them can stop the fit or hold it up.

    Args:
        trackers: where to send.
        fit: what they are told of the fit.
        history: the records that the fit has already.
        say: prints one line.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        fit: FitCard,
        history: Sequence[TrackedRecord],
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._threads = [TrackerThread(one, fit, history, say) for one in trackers]

    def record(self, record: TrackedRecord) -> None:
        """Show a record."""
        for thread in self._threads:
            thread.put(record)

    def keep(self, adapter: AdapterFiles) -> None:
        """Store an adapter."""
        for thread in self._threads:
            thread.put(adapter)

    def finish(self) -> None:
        """End all runs, and say of each where it is or what it lacks."""
        for thread in self._threads:
            thread.end()
        until = time.monotonic() + PATIENCE
        for thread in self._threads:
            self._say(thread.outcome(until - time.monotonic()))
