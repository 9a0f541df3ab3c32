"""Finds which of several replies to one prompt the graph used; the others are excluded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from langchain_core.messages import AIMessage
from langgraph.types import Command

from langchain_art.wire.turn_links import unused_choices

_DEPTH = 4  # of a node's output: a list of commands, each with a state, with a list of messages


class CandidateReplies:
    """Replies to one prompt within one attempt of a node, and the node's output.

    If a node sends the same prompt again (middleware that checks a reply, best of n) and one of the
    replies is in its output, the other replies are unchosen. If none is, all count. Of one
    request's choices (``n > 1``) the first counts, which LangChain returns, unless the node's
    output or a later prompt holds another. Not thread-safe.
    """

    def __init__(self) -> None:
        self._candidates: dict[tuple[UUID | None, int], list[int]] = {}
        self._prompts: dict[UUID, list[int]] = {}
        self._requests: dict[int, int] = {}
        self._by_message: dict[str, int] = {}
        self._returned: set[int] = set()

    def add_call(self, attempt: UUID | None, prompt: int, call: int, first: int) -> None:
        """Add a call, one of the choices of the request that call `first` made."""
        self._candidates.setdefault((attempt, prompt), []).append(call)
        self._requests[call] = first
        if attempt is not None:
            self._prompts.setdefault(attempt, []).append(prompt)

    def add_reply(self, call: int, message_id: str | None) -> None:
        """Add the id of a call's reply."""
        if message_id is not None:
            self._by_message[message_id] = call

    def add_output(self, attempt: UUID, output: Any) -> None:
        """Add a node's output."""
        prompts = self._prompts.get(attempt, ())
        if any(len(self._candidates[attempt, prompt]) > 1 for prompt in prompts):
            held = (self._by_message.get(message.id or "") for message in _replies(output, _DEPTH))
            self._returned.update(call for call in held if call is not None)

    def unchosen(self, continued: set[int]) -> set[int]:
        """The calls whose replies were not used; later prompts continue the calls `continued`."""
        unchosen: set[int] = set()
        used = self._returned | continued
        for (attempt, _), calls in self._candidates.items():
            requests: dict[int, list[int]] = {}
            for call in calls:
                requests.setdefault(self._requests[call], []).append(call)
            for choices in requests.values():
                unchosen.update(unused_choices(choices, used))
            if attempt is not None and self._returned.intersection(calls):
                unchosen.update(calls)
        return unchosen - used


def _replies(value: Any, depth: int) -> Iterator[AIMessage]:
    if isinstance(value, AIMessage):
        yield value
    elif depth > 0:
        inside: Sequence[Any] = ()
        if isinstance(value, Command):
            inside = (cast("Any", value).update,)
        elif isinstance(value, Mapping):
            inside = tuple(cast("Mapping[Any, Any]", value).values())
        elif isinstance(value, list | tuple):
            inside = cast("Sequence[Any]", value)
        for one in inside:
            yield from _replies(one, depth - 1)
