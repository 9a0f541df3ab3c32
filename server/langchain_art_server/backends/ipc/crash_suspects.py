"""Remembers which requests were running when an engine died, so that none ends it again and again.

A request that crashes the engine is sent again by its client: OpenAI's SDK retries a 503 twice. One
that was running at `MAX_DEATHS` deaths is refused. Requests that happened to run beside it may be
retried, and are forgotten when they are answered.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from hashlib import blake2b

from pydantic_core import to_json

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.base import ChatRequest

log = logging.getLogger(__name__)
#: Deaths at which a request was running, from which on it is refused.
MAX_DEATHS = 2
#: Seconds for which a request is remembered: engines also die for reasons of their own.
_REMEMBERED = 600.0
#: Most requests that are remembered: as many as may run at four deaths, by default.
_MAX_SUSPECTS = 4096


class CrashSuspects:
    """The requests of one sampler that were running at a death of its process, by digest."""

    def __init__(self) -> None:
        #: Digest -> deaths, the number of the last one, and when it was.
        self._known: OrderedDict[bytes, tuple[int, int, float]] = OrderedDict()

    def __bool__(self) -> bool:
        """True while any request is remembered; otherwise nothing has to be asked."""
        while self._known:
            key, (_, _, since) = next(iter(self._known.items()))  # the oldest
            if time.monotonic() - since <= _REMEMBERED:
                return True
            del self._known[key]
        return False

    def add(self, request: ChatRequest, death: int) -> None:
        """Remember that a request was running at a death; `death` numbers the engine's deaths."""
        key = _digest(request)
        deaths, last, _ = self._known.pop(key, (0, -1, 0.0))
        deaths += last != death  # the choices of one request (`n`) die together
        self._known[key] = deaths, death, time.monotonic()
        if deaths >= MAX_DEATHS:
            log.error("The request %s was running at %d deaths of the engine.", key.hex(), deaths)
        while len(self._known) > _MAX_SUSPECTS:
            self._known.popitem(last=False)

    def check(self, request: ChatRequest) -> bool:
        """Whether a request was running at a death.

        Raises:
            InvalidRequest: it was at too many; says so, and what to do.
        """
        deaths, _, _ = self._known.get(_digest(request), (0, 0, 0.0))
        if deaths >= MAX_DEATHS:
            raise InvalidRequest(
                f"The engine's process ended {deaths} times while it had this very request, which "
                f"is refused for {_REMEMBERED / 60:.0f} minutes so that it cannot end it again. "
                "Change the request; if it is an ordinary one, report it with the server's log."
            )
        return deaths > 0

    def answered(self, request: ChatRequest) -> None:
        """Forget a request that the engine has survived."""
        self._known.pop(_digest(request), None)


def _digest(request: ChatRequest) -> bytes:
    """Of what the client sent: a retry has another id, and may be routed to a newer version."""
    same = vars(request) | {"id": None, "adapter": None}
    return blake2b(to_json(same, inf_nan_mode="constants"), digest_size=16).digest()
