"""The limits of one key, as token buckets: what it may take in a minute comes back evenly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Self

from langchain_art.errors import QuotaExceeded, RateLimitExceeded
from langchain_art.wire import KeyLimits

Clock = Callable[[], float]
_MINUTE = 60.0
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

    def begin(self, calls: int) -> CallsOfKey:
        """Count calls that begin; the context ends them. Raises RateLimitExceeded."""
        most = self._limits.concurrent_calls
        if most is not None and self._running + calls > most:
            raise RateLimitExceeded(
                f"{self._running} calls of this key are running, and {most} may "
                "(concurrent_calls). Retry when one has ended, or lower the client's concurrency.",
                retry_after=1,
            )
        # More calls than a minute has are let in when all of that is left.
        wanted = min(calls, self._calls.limit) if self._calls else 0
        for bucket, level, what in (
            (self._calls, wanted, "calls"),
            (self._tokens, 1, "tokens"),
        ):
            if bucket is not None and (wait := bucket.seconds_until(level)) > 0:
                raise RateLimitExceeded(
                    f"This key may take {bucket.limit} {what} a minute ({what}_per_minute), and "
                    f"has taken them. Retry in {wait:.1f} s.",
                    retry_after=math.ceil(wait),
                )
        if self._calls is not None:
            self._calls.take(calls)
        self._running += calls
        return CallsOfKey(self, calls)

    def end(self, calls: int) -> None:
        """End a call of `CallsOfKey`."""
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
        """Each limit's name, how much it is, and how much of that is left.

        `stored_bytes` are those of the key's tenant.
        """
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


class CallsOfKey:
    """The calls of one request, as a context."""

    __slots__ = ("_calls", "_meter")

    def __init__(self, meter: Meter, calls: int) -> None:
        self._meter, self._calls = meter, calls

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._meter.end(self._calls)


def duration(seconds: float) -> str:
    """Duration as OpenAI writes it: ``120ms``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
