"""A call that an engine's process has not answered yet, and how it fails when the process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langchain_art.errors import ArtError, EngineUnavailable


class WorkerDied(EngineUnavailable):
    """The engine's process ended while it had this call. Retryable."""


class WorkerHung(WorkerDied):
    """The engine did nothing for this call for too long, and its process was ended. Retryable."""


@dataclass(eq=False)
class PendingCall:
    """A call without an answer.

    `frame` is what the child is sent: when it is ready, or, of an `early` call, before that. With
    `resend` it is sent again if the child dies, until its first event. `receiver` gets the events
    and then the result or error; `deaths` counts the children that died while they had it.
    """

    frame: bytes
    resend: bool
    early: bool
    receiver: Callable[[str, Any], None]
    sent: bool = False
    ended: bool = False
    deaths: int = 0

    def receive(self, kind: str, payload: Any) -> None:
        """Pass on what the child sent: an ``event``, its ``result`` or its ``error``."""
        if kind == "event":
            self.resend = False  # or its caller would get the event twice
        else:
            self.ended = True
        self.receiver(kind, payload)

    def fail(self, error: ArtError) -> None:
        """End it without the child's answer."""
        self.receive("error", error)
