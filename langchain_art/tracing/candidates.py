"""Finds which of several replies to one question the graph used; the others are excluded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeAlias
from uuid import UUID

from langchain_core.messages import BaseMessage
from langchain_core.utils.json import parse_json_markdown
from langgraph.types import Command, Send
from pydantic import BaseModel

from langchain_art.tracing.message_log import jsonable
from langchain_art.wire import Message
from langchain_art.wire.turn_links import DRAWING, unused_choices

_Form: TypeAlias = "tuple[str, ...]"
#: A call's model and LangChain's invocation parameters: tools, response format, stop …
_Question: TypeAlias = "tuple[str | None, Mapping[str, Any]]"
_DEPTH = 8  # of a node's output: commands, in them a state, in it messages, as dicts with blocks
_ROLES = ("ai", "assistant", "human", "user", "system", "developer", "tool")


class CandidateReplies:
    """Replies to one question within one attempt of a node, and the node's output.

    If a node asks the same again (until a reply is good enough, best of n) and the output holds one
    of the replies, the other replies are unchosen. If it holds none, all count. The same is asked
    where messages, model, tools and parameters agree; temperature, seed and the like may differ.

    An output holds a reply as a message, as a text, as the value parsed from it, or as any of these
    in a dict or a new message; if it holds none so, the replies of which it holds the most parts (a
    field, an extract) or that are within a text of it. Equal replies are held alike, unless by id.

    Of one request's choices (``n > 1``) those count that the node's output holds whole, or that a
    later prompt continues. If there is none such, none counts in a node that has ended: which one
    it used is not known. Elsewhere the first counts, which LangChain returns. Not thread-safe.
    """

    def __init__(self) -> None:
        self._asked: dict[tuple[UUID | None, int], list[tuple[_Question, list[int]]]] = {}
        self._candidates: dict[UUID | None, list[list[int]]] = {}
        self._places: dict[int, list[int]] = {}
        self._requests: dict[int, int] = {}
        self._by_message: dict[str, int] = {}
        self._replies: dict[int, Message] = {}
        self._returned: set[int] = set()
        self._ended: set[UUID | None] = set()

    def add_call(
        self, attempt: UUID | None, prompt: int, call: int, first: int, question: _Question
    ) -> None:
        """Add a call, one of the choices of the request that call `first` made."""
        self._requests[call] = first
        calls = self._places.get(first)
        if calls is None:
            calls = self._place(attempt, prompt, question)
            self._places[call] = calls
        calls.append(call)

    def _place(self, attempt: UUID | None, prompt: int, question: _Question) -> list[int]:
        known, calls = self._asked.setdefault((attempt, prompt), []), list[int]()
        for (model, params), same in known:
            if model == question[0] and (
                params is question[1] or _told(params) == _told(question[1])
            ):
                return same
        known.append((question, calls))
        self._candidates.setdefault(attempt, []).append(calls)
        return calls

    def remove_call(self, call: int) -> None:
        """Take back a call that turned out to be none."""
        self._places[call].remove(call)

    def add_reply(self, call: int, ids: tuple[str | None, ...], reply: Message) -> None:
        """Add a call's reply, and its ids."""
        for id in ids:
            if id is not None:
                self._by_message[id] = call
        self._replies[call] = reply

    def add_output(self, attempt: UUID, output: Any) -> None:
        """Add the output of a node that has ended."""
        candidates = [calls for calls in self._candidates.get(attempt, ()) if len(calls) > 1]
        if candidates:
            self._ended.add(attempt)
            texts = set(self._texts(output, _DEPTH))
            for calls in candidates:
                self._returned |= self._held(calls, texts)

    def _texts(self, value: Any, depth: int) -> Iterator[str]:
        """The texts in a value, numbers as JSON; of a message that is a reply its id alone."""
        if isinstance(value, BaseMessage):
            known = self._known(value.id) or self._known(value.response_metadata.get("call_id"))
            calls = [*getattr(value, "tool_calls", ())]
            yield from self._texts(known or [value.text, calls], depth)
        elif isinstance(value, dict) and (known := self._known(value.get("id"))):
            yield known
        elif isinstance(value, Enum):
            yield from self._texts(value.value, depth)
        elif isinstance(value, str):
            if text := value.strip():
                yield text
        elif isinstance(value, int | float):
            yield json.dumps(value)
        elif depth > 0:
            for one in _inside(value):
                yield from self._texts(one, depth - 1)

    def _known(self, id: Any) -> str | None:
        return id if isinstance(id, str) and id in self._by_message else None

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

    def _held(self, calls: list[int], output: set[str]) -> set[int]:
        """The calls whose replies the texts of an output hold; of equal choices the first."""
        held = {self._by_message.get(text, -1) for text in output}.intersection(calls)
        forms: dict[int, tuple[_Form, ...]] = {}
        seen: set[Any] = set()
        for call in calls:
            own = tuple(self._forms(self._replies[call])) if call in self._replies else ()
            if (choice := (self._requests[call], own)) not in seen:
                seen.add(choice)
                forms[call] = own
        whole = {frozenset(form) for own in forms.values() for form in own if output >= set(form)}
        widest = {form for form in whole if not any(form < other for other in whole)}
        held.update(
            call for call, own in forms.items() if any(frozenset(form) in widest for form in own)
        )
        choices = len(calls) > len({self._requests[call] for call in calls})
        return held if held or choices else _by_parts(forms, output)

    def _forms(self, reply: Message) -> Iterator[_Form]:
        content = reply.get("content") or ""
        blocks = [{"text": content}] if isinstance(content, str) else content
        text = "".join(block.get("text") or "" for block in blocks).strip()
        values: list[Any] = [text, _parsed(text)]
        for call in reply.get("tool_calls") or ():
            name, arguments = call["function"]["name"], _parsed(call["function"]["arguments"])
            values += [[call.get("id"), name, arguments], arguments]
        yield from filter(None, (tuple(self._texts(value, _DEPTH)) for value in values))


def _told(params: Mapping[str, Any]) -> Any:
    """A call's parameters as JSON, without those of drawing an answer."""
    given = {**params, **(params.get("extra_body") or {})}
    asked = {k: v for k, v in given.items() if k not in DRAWING and v is not None}
    return jsonable({k: v for k, v in asked.items() if k != "extra_body"})


def _by_parts(forms: Mapping[int, tuple[_Form, ...]], output: set[str]) -> set[int]:
    """The calls of whose replies an output holds the most parts that not all of them have."""
    found: dict[tuple[_Form, ...], set[str]] = {}
    for own in set(forms.values()):
        parts = {part for form in own for part in form}
        texts = [form[0] for form in own if len(form) == 1]
        found[own] = {
            one for one in output if one in parts or any(_shares(one, text) for text in texts)
        }
    common = set[str].intersection(*found.values()) if len(found) > 1 else set[str]()
    most = max((len(held - common) for held in found.values()), default=0)
    return {call for call, own in forms.items() if 0 < most == len(found[own] - common)}


def _parsed(text: str) -> Any:
    try:
        return parse_json_markdown(text, parser=json.loads)
    except (ValueError, RecursionError):
        return None


def _shares(one: str, other: str) -> bool:
    """True if one of two texts is in the other, as whole words; a role and a bool say nothing."""
    short, long = sorted((one, other), key=len)
    if short not in long or short in _ROLES or short in ("true", "false"):
        return False
    return re.search(rf"(?<!\w)(?<!\d[.,]){re.escape(short)}(?!\w|[.,]\d)", long) is not None


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Command):
        yield from (value.update, value.goto)
    elif isinstance(value, Send):
        yield value.arg
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, BaseModel):
        yield from vars(value).values()
    elif is_dataclass(value):
        yield from (getattr(value, field.name) for field in fields(value))
