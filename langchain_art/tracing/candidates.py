"""Which of several answers to one prompt a graph went on with; the others are not to learn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from langchain_core.messages import AIMessage
from langgraph.types import Command

_DEPTH = 4  # of a node's output: a list of commands, each with a state, with a list of messages


class Choices:
    """Answers to one prompt within one attempt of a node, and what the node passed on.

    A node that asks the same again (middleware that checks a reply, the best of several) shows its
    choice by what it returns: where one of the replies is in its output, the others are not chosen.
    Where none is, a node used them in a way of its own, and all count. Of one request's several
    choices (``n > 1``) the first counts, which is what LangChain returns, unless the node or a
    later prompt shows another. Not thread-safe: lock around it.
    """

    def __init__(self) -> None:
        self._rivals: dict[tuple[UUID | None, int], list[int]] = {}
        self._prompts: dict[UUID, list[int]] = {}
        self._requests: dict[int, int] = {}
        self._ids: dict[str, int] = {}
        self._passed: set[int] = set()

    def asked(self, attempt: UUID | None, prompt: int, index: int, first: int) -> None:
        """Notes call `index`, one of the choices of the request that call `first` made."""
        self._rivals.setdefault((attempt, prompt), []).append(index)
        self._requests[index] = first
        if attempt is not None:
            self._prompts.setdefault(attempt, []).append(prompt)

    def answered(self, index: int, message_id: str | None) -> None:
        """Notes the id of a call's reply."""
        if message_id is not None:
            self._ids[message_id] = index

    def returned(self, attempt: UUID, output: Any) -> None:
        """Notes what a node passed on."""
        prompts = self._prompts.get(attempt, ())
        if any(len(self._rivals[attempt, prompt]) > 1 for prompt in prompts):
            held = (self._ids.get(message.id or "") for message in _replies(output, _DEPTH))
            self._passed.update(index for index in held if index is not None)

    def unchosen(self, continued: set[int]) -> set[int]:
        """The calls whose answers were not gone on with, given those that prompts continue."""
        left: set[int] = set()
        went_on = self._passed | continued
        for (attempt, _), rivals in self._rivals.items():
            requests: dict[int, list[int]] = {}
            for index in rivals:
                requests.setdefault(self._requests[index], []).append(index)
            for choices in requests.values():
                left.update(choices if went_on.intersection(choices) else choices[1:])
            if attempt is not None and self._passed.intersection(rivals):
                left.update(rivals)
        return left - went_on


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
