"""Remembers which requests were running when an engine died, so that none ends it again and again.

A request that crashes the engine is sent again by its client: OpenAI's SDK retries a 503 twice. So
are those that happened to run beside it; when one of these is answered, it is cleared. A request
that is left as the only one of two deaths is refused.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from hashlib import blake2b

from pydantic_core import to_json

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.base import ChatRequest

log = logging.getLogger(__name__)
#: Deaths of which a request is the only one left, from which on it is refused.
MAX_DEATHS = 2
#: Seconds for which a death is remembered: engines also die for reasons of their own.
_REMEMBERED = 600.0
#: Most deaths that are remembered.
_MAX_KNOWN = 64


@dataclass
class _Death:
    at: float
    running: set[bytes] = field(default_factory=set[bytes])


class PoisonRequests:
    """The requests of one sampler that were running at a death of its process, by digest."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[Hashable, _Death] = OrderedDict()

    def __bool__(self) -> bool:
        """True while any death is remembered; otherwise nothing has to be asked."""
        while self._deaths:
            number, oldest = next(iter(self._deaths.items()))
            if time.monotonic() - oldest.at <= _REMEMBERED:
                return True
            del self._deaths[number]
        return False

    def add(self, request: ChatRequest, death: Hashable) -> None:
        """Remember that a request was running at a death; `death` numbers the engine's deaths."""
        known = self._deaths.setdefault(death, _Death(time.monotonic()))
        known.running.add(_digest(request))  # the choices of one request die together
        if len(self._deaths) > _MAX_KNOWN:
            self._deaths.popitem(last=False)

    def check(self, request: ChatRequest) -> bool:
        """True if a request was running at a death.

        Raises:
            InvalidRequest: it is the only one left of too many; says so, and what to do.
        """
        key = _digest(request)
        alone = sum(death.running == {key} for death in self._deaths.values())
        if alone >= MAX_DEATHS:
            log.error("The request %s is refused: %d deaths of the engine.", key.hex(), alone)
            raise InvalidRequest(
                f"The engine's process ended {alone} times while it had this very request, which "
                f"is refused for {_REMEMBERED / 60:.0f} minutes so that it cannot end it again. "
                "Change the request; if it is an ordinary one, report it with the server's log."
            )
        return any(key in death.running for death in self._deaths.values())

    def answered(self, request: ChatRequest) -> None:
        """Clear a request, which the engine has survived."""
        key = _digest(request)
        for number, death in list(self._deaths.items()):
            death.running.discard(key)
            if not death.running:
                del self._deaths[number]


def _digest(request: ChatRequest) -> bytes:
    """Digest of what the client sent: a retry has another id, and may get a newer version."""
    same = vars(request) | {"id": None, "adapter": None, "client": None, "run": None}
    return blake2b(to_json(same, inf_nan_mode="constants"), digest_size=16).digest()
