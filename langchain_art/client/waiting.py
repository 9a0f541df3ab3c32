"""Messages of a client while it waits for its server, and its time limits."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from threading import Lock
from typing import cast

import httpx

from langchain_art.errors import RequestRefused

log = logging.getLogger(__name__)
#: Seconds after which a server that never answered is taken for one that is not there. One that
#: did answer may be starting again, which takes as long as its model takes to load.
FIRST_ANSWER = 10.0
#: Seconds after which a request without an answer is spoken of.
SILENCE = 1.5
_REPEAT = 30.0


class Waiting:
    """Says why a client waits, and then that its server answers again. May be used by threads.

    The same words are said again only after half a minute, however many requests wait.
    """

    def __init__(self, base_url: str, say: Callable[[str], None] | None = None) -> None:
        self.base_url = base_url
        self.answered = False
        """True if the server ever answered."""
        self._say = say or log.warning
        self._lock = Lock()
        self._since: float | None = None
        self._said: tuple[str, float] = ("", -_REPEAT)

    def because(self, why: str) -> None:
        """Say that the client waits, and why."""
        now = time.monotonic()
        with self._lock:
            words, at = self._said
            if words == why and now - at < _REPEAT:
                return
            self._since = now if self._since is None else self._since
            self._said = (why, now)
            waited = now - self._since
        after = f" (for {waited:.0f} s now)" if waited >= 1 else ""
        self._say(f"waiting for {self.base_url}: {why}{after}")

    def answer(self, status: int) -> None:
        """The server answered, unless it was only a proxy before it."""
        if status in (502, 504):
            return
        self.answered = True
        if status in (408, 429, 503):
            return
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            self._said = ("", -_REPEAT)
            self._say(f"{self.base_url} answers again, after {time.monotonic() - since:.0f} s")


def reason(failure: BaseException) -> str:
    """Reason why there was no answer, in a few words: ``connection refused``."""
    if isinstance(failure, RequestRefused):
        return str(failure)
    if isinstance(failure, httpx.ConnectTimeout):
        return "no connection: the machine does not answer"
    if isinstance(failure, httpx.TimeoutException):
        return "no answer, though it takes connections"
    found = [failure]
    for one in found:  # grows by their causes while it is read
        if isinstance(one, OSError) and one.errno is not None:
            # Numbers below 0 are those of a name that could not be looked up.
            return (os.strerror(one.errno) if one.errno > 0 else str(one.strerror)).lower()
        causes = [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            causes += cast("BaseExceptionGroup[BaseException]", one).exceptions
        found += [cause for cause in causes if cause is not None and cause not in found]
    return str(failure) or type(failure).__name__
