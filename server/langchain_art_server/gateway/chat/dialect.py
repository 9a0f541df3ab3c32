"""What the formats of model calls have in common.

Each translates its request to that of chat completions, which is checked, sampled and recorded in
one way, and the replies back. A reply's tokens are the same in all of them, and a conversation that
comes back in one is known by its tokens if it was sampled in another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from langchain_art.errors import RequestRefused
from langchain_art_server.backends.base import ChatDelta, ChatReply
from langchain_art_server.gateway.chat.request import CheckedChatRequest
from langchain_art_server.storage.tables import CallRecord

BEGIN, END = "<think>", "</think>"
Kind = Literal["thought", "text"]


class Dialect(ABC):
    """One request: made from its parsed JSON, it answers the request once.

    Attributes:
        prefix: of the ids of its calls.
        body: the request in the format of chat completions.
        previous: the id of a call that it continues; None: its messages are all that there is.
        recorded: added to `CallRecord.request`.
        only_counts: its reply is dropped: it is neither recorded nor counted.
    """

    prefix: str
    body: Any
    previous: str | None = None
    only_counts = False

    def __init__(self) -> None:
        self.recorded: dict[str, Any] = {}

    def continue_call(self, previous: CallRecord) -> None:
        """Put the messages of the call `previous`, and its reply, before those of `body`."""
        raise NotImplementedError

    @abstractmethod
    async def whole(
        self, frame: dict[str, Any], call: CheckedChatRequest, replies: list[ChatReply]
    ) -> bytes:
        """The answer of a request that is not streamed; `frame`: ``id``, ``created``, ``model``."""

    @abstractmethod
    def begin(self, frame: dict[str, Any], call: CheckedChatRequest) -> bytes:
        """The events before the first piece of a reply."""

    @abstractmethod
    def delta(self, index: int, piece: ChatDelta) -> bytes:
        """The events of a piece of choice `index`."""

    @abstractmethod
    async def end(self, index: int, reply: ChatReply) -> bytes:
        """The events at the end of choice `index`."""

    def close(self, replies: list[ChatReply]) -> bytes:
        """The events after the end of all choices."""
        return b""

    @abstractmethod
    def refusal(self, error: RequestRefused) -> bytes:
        """The event of an error after the first event."""


class Part(BaseModel):
    """A part of a request: its ids, states, annotations and hints for a cache are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Thoughts:
    """Splits a reply that begins with ``<think>`` into what was thought and the text after it.

    Both together with the two tags are the reply, character by character, so that a client that
    sends both back sends what was sampled.
    """

    def __init__(self) -> None:
        self._held = ""
        self._kind: Kind | None = None

    def feed(self, text: str) -> list[tuple[Kind, str]]:
        """Pieces that are known by now; the first of what was thought may be empty."""
        pieces: list[tuple[Kind, str]] = []
        self._held += text
        if self._kind is None:
            if len(self._held) < len(BEGIN) and BEGIN.startswith(self._held):
                return pieces
            self._kind = "thought" if self._held.startswith(BEGIN) else "text"
            if self._kind == "thought":
                self._held = self._held.removeprefix(BEGIN)
                pieces.append(("thought", ""))
        if self._kind == "thought":
            thought, end, after = self._held.partition(END)
            if not end:  # what may be the beginning of the tag waits
                waits = next(n for n in range(len(END), -1, -1) if thought.endswith(END[:n]))
                thought, after = thought[: len(thought) - waits], thought[len(thought) - waits :]
            if thought:
                pieces.append(("thought", thought))
            self._held = after
            if not end:
                return pieces
            self._kind = "text"
        if self._held:
            pieces.append(("text", self._held))
        self._held = ""
        return pieces

    def rest(self) -> list[tuple[Kind, str]]:
        """What waited, at the reply's end."""
        held, self._held = self._held, ""
        return [(self._kind or "text", held)] if held else []


def split(content: str | None) -> tuple[str | None, str]:
    """What was thought (None: the reply does not begin with ``<think>``), and the text after it."""
    if not (content or "").startswith(BEGIN):
        return None, content or ""
    thought, _, text = (content or "")[len(BEGIN) :].partition(END)
    return thought, text
