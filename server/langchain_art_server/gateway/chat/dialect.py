"""Common parts of the formats of model calls (`Dialect`).

Each translates its request to that of chat completions, which is checked, sampled and recorded in
one way, and the replies back. A reply's tokens are the same in all of them, and a conversation that
comes back in one is known by its tokens if it was sampled in another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from langchain_art.errors import RequestRefused
from langchain_art_server.backends.base import ChatDelta, ChatReply
from langchain_art_server.backends.chat.tool_calls.call_format import overlap
from langchain_art_server.gateway.chat.request import CheckedChatRequest
from langchain_art_server.storage.tables import CallRecord

BEGIN, END = "<think>", "</think>"
Kind = Literal["thought", "text"]


class Dialect(ABC):
    """One request: made from its parsed JSON, it answers the request once.

    Attributes:
        prefix: of the ids of its calls.
        body: the request in the format of chat completions.
        recorded: added to `CallRecord.request`.
        only_counts: its reply is dropped: it is neither recorded nor counted.
    """

    prefix: str
    body: Any
    only_counts = False

    def __init__(self) -> None:
        self.recorded: dict[str, Any] = {}

    async def refer(  # noqa: B027 - most requests name no call
        self, call_of: Callable[[str], Awaitable[CallRecord]]
    ) -> None:
        """Complete `body` with the earlier calls that the request names."""

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


class Text(Part):
    """A part of a text."""

    text: str


def content_of(content: str | Sequence[Text]) -> str | list[dict[str, Any]]:
    """The content of a message of chat completions."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call of chat completions."""
    function = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


class Thoughts:
    """Splits a reply that begins with ``<think>`` into the thought and the text after it.

    Both together with the two tags are the reply, character by character, so that a client that
    sends both back sends what was sampled.
    """

    def __init__(self) -> None:
        self._held = ""
        self._kind: Kind | None = None

    def feed(self, text: str) -> list[tuple[Kind, str]]:
        """Pieces that are known by now; the first one of a thought may be empty."""
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
                known = len(thought) - overlap(thought, END)
                thought, after = thought[:known], thought[known:]
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
        """The rest of the reply, at its end."""
        held, self._held = self._held, ""
        return [(self._kind or "text", held)] if held else []


def split(content: str | None) -> tuple[str | None, str]:
    """The thought (None: the reply does not begin with ``<think>``), and the text after it."""
    if not (content or "").startswith(BEGIN):
        return None, content or ""
    thought, _, text = (content or "")[len(BEGIN) :].partition(END)
    return thought, text
