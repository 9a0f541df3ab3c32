"""Limits of calls: of all that run at once, shared between clients, and of one key.

A key's are token buckets: what it may take in a minute comes back evenly.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from langchain_art.errors import InvalidRequest, Overloaded, QuotaExceeded, RateLimitExceeded
from langchain_art.wire import KeyLimits

Clock = Callable[[], float]
_MINUTE = 60.0
#: Seconds for which a client that was refused counts as waiting: it comes back after Retry-After.
_WAITS = 5.0
_MAX_WAITING = 1024
#: Clients without a call that are remembered.
_MAX_SEEN = 256
_TOO_MANY = "got {} choices (n), and {}, so that it can never run. Ask for fewer at once."
Header = tuple[bytes, bytes]
_OF_CALLS, _OF_TOKENS = (
    [b"x-ratelimit-%b-%b" % (kind, what) for kind in (b"limit", b"remaining", b"reset")]
    for what in (b"requests", b"tokens")
)


class _Bucket:
    """Holds up to `limit`, and gets that much in a minute. It may be overdrawn."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit, self._clock = limit, clock
        self._level, self._at = float(limit), clock()

    @property
    def level(self) -> float:
        now = self._clock()
        gained = max(0.0, now - self._at) * self.limit / _MINUTE
        self._level, self._at = min(float(self.limit), self._level + gained), now
        return self._level

    def take(self, count: int) -> None:
        self._level = self.level - count

    def seconds_until(self, level: float) -> float:
        return max(0.0, level - self.level) * _MINUTE / self.limit


class Meter:
    """Counts one key's calls against its limits."""

    def __init__(self, limits: KeyLimits, clock: Clock = time.monotonic) -> None:
        self._limits = limits
        asked, tokens = limits.calls_per_minute, limits.tokens_per_minute
        self._calls = _Bucket(asked, clock) if asked else None
        self._tokens = _Bucket(tokens, clock) if tokens else None
        self._running = 0

    def begin(self, calls: int) -> ExitStack:
        """Count calls that begin; the context ends them. Raises RateLimitExceeded."""
        most = self._limits.concurrent_calls
        if most is not None and calls > most:
            raise InvalidRequest(_TOO_MANY.format(calls, f"this key's concurrent_calls is {most}"))
        if most is not None and self._running + calls > most:
            raise RateLimitExceeded(
                f"{self._running} calls of this key are running, and {most} may "
                "(concurrent_calls). Retry when one has ended, or lower the client's concurrency.",
                retry_after=1,
            )
        # More calls than a minute has are let in when all of that is left.
        wanted = min(calls, self._calls.limit) if self._calls else 0
        for bucket, level, what in ((self._calls, wanted, "calls"), (self._tokens, 1, "tokens")):
            if bucket is not None and (wait := bucket.seconds_until(level)) > 0:
                raise RateLimitExceeded(
                    f"This key may take {bucket.limit} {what} a minute ({what}_per_minute), and "
                    f"has taken them. Retry in {wait:.1f} s.",
                    retry_after=math.ceil(wait),
                )
        if self._calls is not None:
            self._calls.take(calls)
        self._running += calls
        context = ExitStack()
        context.callback(self._end, calls)
        return context

    def _end(self, calls: int) -> None:
        self._running -= calls

    def count_tokens(self, tokens: int) -> None:
        """Count the tokens of a call that was sampled."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def require_space(self, stored_bytes: int) -> None:
        """Raises QuotaExceeded if the key's tenant has as much stored as the key allows."""
        most = self._limits.stored_bytes
        if most is not None and stored_bytes >= most:
            raise QuotaExceeded(
                f"This tenant's database and adapters have {stored_bytes} bytes, and the key's "
                f"limit stored_bytes is {most}. Delete runs or policies, or ask for a key with a "
                "higher limit."
            )

    def state(self, stored_bytes: int) -> list[tuple[str, float, float]]:
        """Each limit's name, its size, and what is left; `stored_bytes` are the tenant's."""
        found: list[tuple[str, float, float]] = []
        for name, bucket in (
            ("calls_per_minute", self._calls),
            ("tokens_per_minute", self._tokens),
        ):
            if bucket is not None:
                found.append((name, bucket.limit, max(0.0, bucket.level)))
        for name, most, taken in (
            ("concurrent_calls", self._limits.concurrent_calls, self._running),
            ("stored_bytes", self._limits.stored_bytes, stored_bytes),
        ):
            if most is not None:
                found.append((name, most, max(0, most - taken)))
        return found

    def headers(self) -> list[Header]:
        """Headers of OpenAI's API for what is left."""
        found: list[Header] = []
        for names, bucket in ((_OF_CALLS, self._calls), (_OF_TOKENS, self._tokens)):
            if bucket is not None:
                level = bucket.level
                reset = duration((bucket.limit - level) * _MINUTE / bucket.limit)
                values = (b"%d" % bucket.limit, b"%d" % max(0, math.floor(level)), reset.encode())
                found += zip(names, values, strict=True)
        return found


def duration(seconds: float) -> str:
    """Duration as OpenAI writes it: ``120ms``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


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
        """Slots for the choices of one request.

        Raises Overloaded; InvalidRequest: there will never be as many.
        """
        if count > self._limit:
            allowed = f"the server's setting max_running_calls is {self._limit}"
            raise InvalidRequest(_TOO_MANY.format(count, allowed))
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
