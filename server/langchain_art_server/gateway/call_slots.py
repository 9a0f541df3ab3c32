"""The slots of calls that may run at once, shared between clients."""

from __future__ import annotations

import time
from collections import Counter
from typing import Self

from langchain_art.errors import Overloaded

#: Seconds for which a client that was refused counts as waiting: it comes back after Retry-After.
_WAITS = 5.0
_MAX_WAITING = 1024
#: Clients without a call that are remembered.
_MAX_SEEN = 256


class CallSlots:
    """Slots for `limit` calls.

    One client may have all of them, and a sixteenth more are for others. While another waits (it
    was refused), a client gets none beyond its share: the limit over the number of clients that
    have slots or wait. A client is a peer's address: there is one key.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._of_all = limit, limit + limit // 16
        self._of: Counter[str] = Counter()
        self._waiting: dict[str, float] = {}
        #: When the last call of a client that has none now ended, the longest ago first.
        self._seen: dict[str, float] = {}
        self.running = 0

    def take(self, client: str, count: int) -> Lease:
        """Slots for the choices of one request. Raises Overloaded."""
        mine = self._of[client] + count
        full = self.running + count > self._of_all or mine > self._limit
        if full or (self._waiting and mine > count and self._beyond_share(client, mine)):
            self._refuse(client, full)
        if self._waiting:
            self._waiting.pop(client, None)
        self._of[client] = mine
        self.running += count
        return Lease(self, client, count)

    def give_back(self, client: str, count: int) -> None:
        """Take back a slot from `Lease`."""
        self.running -= count
        self._of[client] -= count
        if not self._of[client]:
            del self._of[client]
            self._seen.pop(client, None)
            self._seen[client] = time.monotonic()
            if len(self._seen) > _MAX_SEEN:
                del self._seen[next(iter(self._seen))]

    def clients(self) -> list[tuple[str, int, float]]:
        """Client, its calls that run now, and the seconds since it had one: the latest first."""
        now = time.monotonic()
        busy = [(one, count, 0.0) for one, count in self._of.items()]
        idle = [(one, 0, now - at) for one, at in self._seen.items() if one not in self._of]
        return busy + idle[::-1]

    def _beyond_share(self, client: str, wanted: int) -> bool:
        now = time.monotonic()
        self._waiting = {one: until for one, until in self._waiting.items() if until > now}
        others = self._waiting.keys() - {client}
        return bool(others) and wanted > self._limit // len(others | self._of.keys() | {client})

    def _refuse(self, client: str, full: bool) -> None:
        if len(self._waiting) < _MAX_WAITING:
            self._waiting[client] = time.monotonic() + _WAITS
        why = "" if full else f"; {self._of[client]} of them are yours, and other clients wait"
        raise Overloaded(
            f"{self.running} calls are running, and {self._limit} may{why}. Retry, or lower the "
            "client's concurrency.",
            retry_after=1,
        )


class Lease:
    """One request's slots, as a context. `give_back` is for a choice that ends before it."""

    __slots__ = ("_all", "_client", "_count")

    def __init__(self, slots: CallSlots, client: str, count: int) -> None:
        self._all, self._client, self._count = slots, client, count

    def give_back(self, count: int = 1) -> None:
        """Slots of choices that are sampled: a slow reader keeps none from others."""
        self._count -= count
        self._all.give_back(self._client, count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.give_back(self._count)
