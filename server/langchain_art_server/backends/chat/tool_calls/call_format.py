"""Interface of a format of tool calls: how a model writes them, and how they are read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from langchain_art_server.backends.base import ChatDelta

if TYPE_CHECKING:
    from langchain_art_server.backends.chat.tool_calls.json_calls import HarmonyRewriter

#: Text in which the closing mark counts outside of JSON strings alone.
JSON_TEXT = r'(?:[^"]|"(?:[^"\\]|\\.)*")*?'
ANY_TEXT = r".*?"  # text in which the closing mark counts wherever it stands
Schemas = Mapping[str, Mapping[str, Any]]  # A tool's name -> the JSON Schema of its arguments


class FunctionCall(NamedTuple):
    """A call that was read: the function's name, and its arguments as JSON.

    `id` is the model's own name of the call; empty if it writes none.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Guide:
    """Notation of forced calls, for guided decoding."""

    before: str = ""
    """Text before the first call; this and the others may hold special tokens."""
    head: str = '{"name": {json_name}, "arguments": '
    """Text before a call's arguments. ``{name}`` is the function's name, ``{json_name}`` the
    same in quotes."""
    tail: str = "}"  # text after a call's arguments
    between: str | None = None  # text between two calls; None if a forced reply has one call
    after: str = ""  # text after the last call
    argument: tuple[str, str] | None = None
    """Text before an argument, with its ``{key}``, and after it; None: the arguments are one
    JSON object."""
    separator: str = ""  # text between two arguments
    values: Literal["text", "json", "gemma"] = "text"
    """Notation of each argument: strings without quotes and others as JSON (``text``), all as
    JSON, or as Gemma 4 has it."""
    answer: str = ""  # text before an answer in JSON, which calls nothing

    def call(self, name: str, json_name: str) -> str:
        """The head of a call of a function."""
        return self.head.replace("{name}", name).replace("{json_name}", json_name)


@dataclass(frozen=True)
class ToolFormat:
    """Notation of a model's tool calls."""

    name: str  # key in `FORMATS`
    families: str  # models that use it, for people
    parse: Callable[[str, Schemas], list[FunctionCall]]
    """The calls in the text between `opener` and `closer`. Raises ValueError or RecursionError if
    it is malformed."""
    guide: Guide  # how forced calls are written
    opener: str = ""  # what a call begins with; empty if the reply as a whole is the call
    closer: str = ""  # what a call ends with; empty if it ends with the reply
    starts: tuple[str, ...] = ()  # without an `opener`, what a reply with calls begins with
    inside: str = JSON_TEXT  # pattern of the text before `closer`
    markers: tuple[str, ...] = ()  # special tokens that must not be removed from the decoded text
    rewriter: Callable[[], HarmonyRewriter] | None = None
    """Makes what rewrites a reply while it is streamed, before calls are looked for; None: it is
    read as it is."""
    new_id: Callable[[Random], str] = lambda rng: f"call_{rng.getrandbits(128):032x}"
    """Draws the id of a call that the model gave none."""

    def calls(self, text: str, schemas: Schemas) -> list[FunctionCall]:
        """The calls in the text between `opener` and `closer`; none if it is malformed.

        A lone surrogate makes it malformed: no client could send it back.
        """
        try:
            found = self.parse(text, schemas)
            for call in found:
                "".join(call).encode()
                if "\\u" in call.arguments:
                    json.dumps(json.loads(call.arguments), ensure_ascii=False).encode()
        except (ValueError, RecursionError, TypeError):  # TypeError: a list in a set, say
            return []
        return found

    def end_of_call(self, text: str) -> int:
        """End of the first `closer` that counts in a `text` with `opener`, or -1."""
        if not self.closer:
            return -1
        to_closer = re.compile(self.inside + re.escape(self.closer), re.DOTALL)
        match = to_closer.match(text, len(self.opener))
        return match.end() if match else -1


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if marker.startswith(text[-size:])), 0)


class ToolCallParser:
    """Splits a reply into text and tool calls while it is streamed.

    The sizes of the pieces do not matter: the deltas of `feed` together are the same.
    White space next to a call is dropped; text that may be the beginning of a call is held back.

    Args:
        form: how the model writes; None: all is text.
        calls: False: calls stay text.
        tools: the request's, as OpenAI writes them. Their schemas tell a string from another value
            where the format does not.
        one_call: further calls after the first are left out of the reply.
        ids: draws the ids of calls.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        tools: Sequence[dict[str, Any]] = (),
        *,
        calls: bool = True,
        one_call: bool = False,
        ids: Random | None = None,
    ) -> None:
        self._form, self._one_call = form if calls else None, one_call
        self._ids = ids or Random()
        functions = [tool["function"] for tool in tools]
        self._schemas = {f["name"]: f.get("parameters") or {} for f in functions}
        self._rewriter = form.rewriter() if form and form.rewriter else None
        self._buffer = self._space = ""
        self._after_call = self._has_text = False
        self.calls: list[dict[str, Any]] = []
        self.content = ""

    def feed(self, text: str, *, last: bool = False) -> ChatDelta:
        """Add text, the `last` of which ends the reply; returns text and calls that are final."""
        content, calls = len(self.content), len(self.calls)
        if self._rewriter is not None:
            text = self._rewriter.push(text, last=last)
        if self._form is None:
            self.content += text
        else:
            self._buffer += text
            self._scan(self._form)
            if last:
                self._end(self._form)
        return ChatDelta(self.content[content:], self.calls[calls:])

    def _end(self, form: ToolFormat) -> None:
        rest, self._buffer = self._buffer, ""
        whole = not form.closer and rest.startswith(form.opener)
        if found := form.calls(rest[len(form.opener) :], self._schemas) if whole else []:
            self._add_calls(form, found)
        elif rest:
            self._add_text(rest)
        if not self._after_call:
            self.content += self._space

    def _scan(self, form: ToolFormat) -> None:
        if not form.opener:
            start = self._buffer.lstrip()
            begins = any(start.startswith(mark[: len(start)]) for mark in form.starts)
            if self._has_text or not begins:
                self._add_text(self._buffer)
                self._buffer = ""
            return
        while True:
            at = self._buffer.find(form.opener)
            cut = at if at >= 0 else len(self._buffer) - overlap(self._buffer, form.opener)
            self._add_text(self._buffer[:cut])
            self._buffer = self._buffer[cut:]
            if at < 0 or (end := form.end_of_call(self._buffer)) < 0:
                return
            call, self._buffer = self._buffer[:end], self._buffer[end:]
            if found := form.calls(call[len(form.opener) : -len(form.closer)], self._schemas):
                self._add_calls(form, found)
            else:
                self._add_text(call)

    def _add_text(self, text: str) -> None:
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._has_text = True
            self.content += "\n" + body if self._after_call and self.content else body
            self._after_call = False

    def _add_calls(self, form: ToolFormat, calls: list[FunctionCall]) -> None:
        self._space, self._after_call = "", True
        for call in calls:
            if self.calls and self._one_call:
                return
            function = {"name": call.name, "arguments": call.arguments}
            taken = {one["id"] for one in self.calls}
            id_ = call.id if call.id and call.id not in taken else form.new_id(self._ids)
            self.calls.append({"id": id_, "type": "function", "function": function})
