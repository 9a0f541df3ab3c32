"""Values of a graph's state, short enough to be read beside a span."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langgraph.types import Command
from pydantic import BaseModel

#: Characters of all texts of one value; levels and entries of it that are looked into.
CHARACTERS, DEPTH, ENTRIES = 8_000, 8, 50

_ROLES = {"human": "user", "ai": "assistant"}
_SPEAKERS = ("user", "human", "assistant", "ai", "system", "developer", "tool")


def brief(value: Any, characters: int = CHARACTERS) -> Any:
    """A value as JSON values with at most so many characters of text; what is cut says so."""
    return _Brief(characters).of(value, DEPTH)


def was_cut(value: Any) -> bool:
    """True if `brief` has left out a part of a value."""
    return bool(_MARKS.search(json.dumps(value, ensure_ascii=False, default=str)))


#: What `brief` writes where it leaves something out.
_MARKS = re.compile(r"… \(\d+ (?:characters|in all)\)|\"…\"")


def tool_result(output: Any) -> Any:
    """Result of a tool: of a message with it, the content."""
    return output.content if isinstance(output, ToolMessage) else output


def last_message(output: Any) -> Any:
    """A graph's output with the last of its messages alone; any other output as it is."""
    said = output.get("messages") if isinstance(output, Mapping) else None
    return {**output, "messages": said[-1:]} if isinstance(said, list) and said else output


class _Brief:
    def __init__(self, characters: int) -> None:
        self._left = characters

    def of(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, str):
            return self._text(value)
        if depth == 0:
            return "…"
        if isinstance(value, BaseMessage):
            return self._message(value, depth)
        if isinstance(value, Command):
            return self.of({"update": value.update, "goto": value.goto}, depth)
        if isinstance(value, BaseModel):
            value = dict(value)
        if isinstance(value, Mapping):
            entries = list(value.items())
            found = {
                str(key): self.of(_said(one) if key == "messages" else one, depth - 1)
                for key, one in entries[:ENTRIES]
            }
            return found | _cut(len(entries))
        if isinstance(value, list | tuple | set | frozenset):
            listed = list(value)
            more = [f"… ({len(listed)} in all)"] if len(listed) > ENTRIES else []
            return [self.of(one, depth - 1) for one in listed[:ENTRIES]] + more
        return self._text(str(value))

    def _text(self, text: str) -> str:
        shown = text[: max(self._left, 0)]
        self._left -= len(shown)
        return shown if len(shown) == len(text) else f"{shown}… ({len(text)} characters)"

    def _message(self, message: BaseMessage, depth: int) -> dict[str, Any]:
        role = _ROLES.get(message.type, message.type)
        found = {"role": role, "content": self.of(message.content, depth - 1)}
        if isinstance(message, AIMessage) and message.tool_calls:
            calls = [{"name": one["name"], "args": one["args"]} for one in message.tool_calls]
            found["tool_calls"] = self.of(calls, depth - 1)
        return found


def _said(messages: Any) -> Any:
    """Messages that were written as pairs, ``("user", "hi")``, with role and content."""
    if not isinstance(messages, list | tuple):
        return messages
    return [
        {"role": _ROLES.get(one[0], one[0]), "content": one[1]}
        if isinstance(one, list | tuple) and len(one) == 2 and one[0] in _SPEAKERS
        else one
        for one in messages
    ]


def _cut(entries: int) -> dict[str, str]:
    return {"…": f"({entries} entries in all)"} if entries > ENTRIES else {}
