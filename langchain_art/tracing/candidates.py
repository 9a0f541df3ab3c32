"""Finds which of several replies to one question the graph used; the others are excluded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast
from uuid import UUID

from langchain_core.messages import AIMessage, BaseMessage
from langgraph.types import Command, Send
from pydantic import BaseModel

from langchain_art.tracing.message_log import jsonable
from langchain_art.wire.turn_links import unused_choices

_DEPTH = 4  # of a node's output: a list of commands, each with a state, with a list of messages
# Parameters of a call that say how its answer is drawn and sent, not what is asked.
_DRAWING = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "logprobs", "top_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stream", "stream_options"),
    *("timeout", "extra_headers", "extra_query", "user", "store", "service_tier", "metadata"),
    "art",
}


@dataclass(slots=True, eq=False)
class Question:
    """What a call asks, beside its messages."""

    model: str | None
    params: Mapping[str, Any]
    """LangChain's invocation parameters: tools, response format, stop …"""

    def is_as(self, other: Question) -> bool:
        """Whether model, tools and all parameters agree, but for those of drawing an answer."""
        return self.model == other.model and (
            self.params is other.params or self._asked() == other._asked()
        )

    def _asked(self) -> Any:
        given = {**self.params, **(self.params.get("extra_body") or {})}
        return jsonable(
            {
                name: value
                for name, value in given.items()
                if name not in _DRAWING and name != "extra_body" and value is not None
            }
        )


class CandidateReplies:
    """Replies to one question within one attempt of a node, and the node's output.

    If a node asks the same again (middleware that checks a reply, best of n) and one of the replies
    is in its output, the other replies are unchosen. If none is, all count. The same is asked where
    messages, model, tools and parameters agree; temperature, seed and the like may differ.

    Of one request's choices (``n > 1``) those count that the node's output holds, as a message or
    as text, or that a later prompt continues. If there is none such, none counts in a node that
    has ended: which one it used is not known. Elsewhere the first counts, which LangChain returns.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._questions: dict[tuple[UUID | None, int], list[tuple[Question, list[int]]]] = {}
        self._candidates: dict[UUID | None, list[list[int]]] = {}
        self._places: dict[int, list[int]] = {}
        self._requests: dict[int, int] = {}
        self._by_message: dict[str, int] = {}
        self._texts: dict[int, str] = {}
        self._returned: set[int] = set()
        self._ended: set[UUID] = set()

    def add_call(
        self, attempt: UUID | None, prompt: int, call: int, first: int, question: Question
    ) -> None:
        """Add a call, one of the choices of the request that call `first` made."""
        self._requests[call] = first
        calls = self._places.get(first)
        if calls is None:
            calls = self._place(attempt, prompt, question)
            self._places[call] = calls
        calls.append(call)

    def _place(self, attempt: UUID | None, prompt: int, question: Question) -> list[int]:
        """The calls of an attempt that asked the same."""
        known, calls = self._questions.get((attempt, prompt)), list[int]()
        if known is None:
            self._questions[attempt, prompt] = [(question, calls)]
        else:
            for other, same in known:
                if question.is_as(other):
                    return same
            known.append((question, calls))
        self._candidates.setdefault(attempt, []).append(calls)
        return calls

    def add_reply(self, call: int, ids: tuple[str | None, ...], text: str | None = None) -> None:
        """Add the ids of a call's reply and, of one choice of several, its text."""
        for id in ids:
            if id is not None:
                self._by_message[id] = call
        if text is not None:
            self._texts[call] = text.strip()

    def add_output(self, attempt: UUID, output: Any) -> None:
        """Add the output of a node that has ended."""
        candidates = [calls for calls in self._candidates.get(attempt, ()) if len(calls) > 1]
        if not candidates:
            return
        self._ended.add(attempt)
        texts: set[str] = set()
        for leaf in _leaves(output, _DEPTH):
            if isinstance(leaf, AIMessage):
                for id in (leaf.id, leaf.response_metadata.get("call_id")):
                    if (call := self._by_message.get(id or "")) is not None:
                        self._returned.add(call)
            texts.add((leaf if isinstance(leaf, str) else leaf.text).strip())
        for calls in candidates:
            for choices in self._by_request(calls):
                if len(choices) > 1 and self._returned.isdisjoint(choices):
                    said = [call for call in choices if self._texts.get(call) in texts]
                    self._returned.update(said[:1])

    def unchosen(self, continued: set[int]) -> set[int]:
        """The calls whose replies were not used; later prompts continue the calls `continued`."""
        unchosen: set[int] = set()
        used = self._returned | continued
        for attempt, candidates in self._candidates.items():
            for calls in candidates:
                for choices in self._by_request(calls):
                    unchosen.update(unused_choices(choices, used))
                    if len(choices) > 1 and attempt in self._ended:
                        unchosen.update(choices)
                if attempt is not None and self._returned.intersection(calls):
                    unchosen.update(calls)
        return unchosen - used

    def _by_request(self, calls: list[int]) -> Iterator[list[int]]:
        requests: dict[int, list[int]] = {}
        for call in calls:
            requests.setdefault(self._requests[call], []).append(call)
        yield from requests.values()


def _leaves(value: Any, depth: int) -> Iterator[BaseMessage | str]:
    """The messages and texts in a node's output."""
    if isinstance(value, BaseMessage | str):
        yield value
    elif depth > 0:
        for one in _inside(value):
            yield from _leaves(one, depth - 1)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Command):
        yield cast("Any", value).update
        yield cast("Any", value).goto
    elif isinstance(value, Send):
        yield value.arg
    elif isinstance(value, Mapping):
        yield from cast("Mapping[Any, Any]", value).values()
    elif isinstance(value, list | tuple):
        yield from cast("list[Any]", value)
    elif isinstance(value, BaseModel):
        yield from vars(value).values()
    elif is_dataclass(value):
        yield from (getattr(value, field.name) for field in fields(value))
