r"""Tool calls in replies: a registry of formats, and a streaming parser for any of them.

* ``hermes`` (Qwen, Hermes): ``<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>``
* ``mistral``: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}``
* ``llama``: the whole reply is ``{"name": …, "parameters": {…}}``, several separated by ``;``

To add a format, write a function that parses its calls and add a `ToolFormat` to `FORMATS`. The
arguments keep the model's own text, so that a history with them renders as it was sampled. A
malformed call stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from langchain_art_server.backends.base import ChatDelta

_SPACE = re.compile(r"[ \t\r\n]*")
_ARGS = "[ARGS]"
#: A function's name, and its arguments as JSON in the model's own words.
FunctionCall = tuple[str, str]


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        name: key in `FORMATS`.
        template_marks: a chat template uses this format if it has all strings of one of these.
        parse: the calls in the text between `opener` and `closer`. Raises ValueError or
            RecursionError if it is malformed.
        grammar: calls as a Lark rule for guided decoding. ``{opener}`` and ``{closer}`` stand for
            those tokens, ``body`` is a rule for one JSON object, ``{more}`` is `more` or nothing.
        more: further calls as a Lark rule; empty if the grammar allows one call only.
        opener: what a call begins with; empty if the reply as a whole is the call.
        closer: what a call ends with; empty if it ends with the reply.
        starts: without an `opener`, what a reply with calls begins with.
        markers: special tokens that must not be removed from the decoded text.
        arguments: key of the arguments in the JSON object of a call.
    """

    name: str
    template_marks: tuple[tuple[str, ...], ...]
    parse: Callable[[str], list[FunctionCall]]
    grammar: str
    more: str = ""
    opener: str = ""
    closer: str = ""
    starts: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    arguments: str = "arguments"

    def calls(self, text: str) -> list[FunctionCall]:
        """The calls in the text between `opener` and `closer`; none if it is malformed."""
        try:
            return self.parse(text)
        except (ValueError, RecursionError):
            return []

    def end_of_call(self, text: str) -> int:
        """End of the first `closer` outside of JSON strings in a `text` with `opener`, or -1."""
        if not self.closer:
            return -1
        body = re.compile(r'(?:[^"]|"(?:[^"\\]|\\.)*")*?' + re.escape(self.closer), re.DOTALL)
        match = body.match(text, len(self.opener))
        return match.end() if match else -1


def tool_format(template: str) -> ToolFormat | None:
    """The first of `FORMATS` that a chat template uses; None if it uses none of them."""
    plain = template.replace('\\"', '"')
    for form in FORMATS.values():
        if any(all(mark in plain for mark in marks) for marks in form.template_marks):
            return form
    return None


class ToolCallParser:
    """Splits a reply into text and tool calls while it is streamed.

    The sizes of the pieces do not matter: the deltas of `feed` together are the same.
    White space next to a call is dropped; text that may be the beginning of a call is held back.
    """

    def __init__(self, form: ToolFormat | None, *, one_call: bool = False) -> None:
        """`one_call`: further calls after the first are left out of the reply."""
        self._form, self._one_call = form, one_call
        self._buffer = self._space = ""
        self._after_call = self._has_text = False
        self.calls: list[dict[str, Any]] = []
        self.content = ""

    def feed(self, text: str, *, last: bool = False) -> ChatDelta:
        """Add text, the `last` of which ends the reply; returns text and calls that are final."""
        content, calls = len(self.content), len(self.calls)
        if self._form is None:
            self.content += text
        else:
            self._buffer += text
            self._scan(self._form)
            if last:
                self._end(self._form)
        return ChatDelta(self.content[content:], self.calls[calls:])

    def _end(self, form: ToolFormat) -> None:
        """Take what was held back."""
        rest, self._buffer = self._buffer, ""
        whole = not form.closer and rest.startswith(form.opener)
        if found := form.calls(rest[len(form.opener) :]) if whole else []:
            self._add_calls(found)
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
            if found := form.calls(call[len(form.opener) : -len(form.closer)]):
                self._add_calls(found)
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

    def _add_calls(self, calls: list[FunctionCall]) -> None:
        self._space, self._after_call = "", True
        for name, arguments in calls:
            if self.calls and self._one_call:
                return
            function = {"name": name, "arguments": arguments}
            self.calls.append(
                {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
            )


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if marker.startswith(text[-size:])), 0)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """Read a JSON object at `at`: key -> (value, its own text), and where the object ends."""
    members: dict[str, tuple[Any, str]] = {}
    if text[at : at + 1] != "{":
        raise ValueError("expected an object")
    at = _skip(text, at + 1)
    while text[at : at + 1] != "}":
        if members:
            if text[at : at + 1] != ",":
                raise ValueError("expected a comma")
            at = _skip(text, at + 1)
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise ValueError("expected a key")
        start = _skip(text, at + 1)
        value, end = _DECODER.raw_decode(text, start)
        members[key] = (value, text[start:end])
        at = _skip(text, end)
    return members, at + 1


def _call_at(text: str, at: int) -> tuple[FunctionCall, int]:
    """Read the JSON object of a call at `at`, and white space after it."""
    members, end = _members(text, at)
    name = members.get("name", (None, ""))[0]
    value, raw = members.get("arguments") or members.get("parameters") or (None, "")
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError("expected a name")
    if not isinstance(value, dict):
        raise ValueError("expected an object of arguments")
    return (name, raw), _skip(text, end)


def _parse_hermes(text: str) -> list[FunctionCall]:
    call, end = _call_at(text, _skip(text, 0))
    if end < len(text):
        raise ValueError("expected one call")
    return [call]


def _parse_llama(text: str) -> list[FunctionCall]:
    text = text.strip().removeprefix("<|python_tag|>")
    calls: list[FunctionCall] = []
    at = _skip(text, 0)
    while at < len(text):
        call, at = _call_at(text, at)
        calls.append(call)
        if text[at : at + 1] == ";":
            at = _skip(text, at + 1)
    return calls


def _parse_mistral(text: str) -> list[FunctionCall]:
    calls: list[FunctionCall] = []
    for part in text.split("[TOOL_CALLS]"):
        name, mark, arguments = part.partition(_ARGS)
        wrapped = f'{{"name": {json.dumps(name.strip())}, "arguments": {arguments}}}'
        calls += _parse_hermes(wrapped) if mark else _parse_array(part)
    return calls


def _parse_array(text: str) -> list[FunctionCall]:
    calls: list[FunctionCall] = []
    at = _skip(text, 0)
    while text[at : at + 1] == ("," if calls else "["):
        call, at = _call_at(text, _skip(text, at + 1))
        calls.append(call)
    if not calls or text[at : at + 1] != "]" or _skip(text, at + 1) < len(text):
        raise ValueError("expected an array of calls")
    return calls


HERMES = ToolFormat(
    "hermes",
    (("<tool_call>", '"arguments"'),),
    _parse_hermes,
    r'{opener} "\n" body "\n" {closer} {more}',
    r'("\n" {opener} "\n" body "\n" {closer})*',
    opener="<tool_call>",
    closer="</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)
MISTRAL = ToolFormat(
    "mistral",
    (("[TOOL_CALLS]",),),
    _parse_mistral,
    '{opener} "[" body {more} "]"',
    '(", " body)*',
    opener="[TOOL_CALLS]",
    markers=("[TOOL_CALLS]", _ARGS),
)
LLAMA = ToolFormat(
    "llama",
    (('"parameters"',), ("<|python_tag|>",)),
    _parse_llama,
    "body",
    starts=("{", "<|python_tag|>"),
    markers=("<|python_tag|>",),
    arguments="parameters",
)
#: The known formats by name, in the order in which `tool_format` tries them.
FORMATS = {form.name: form for form in (HERMES, MISTRAL, LLAMA)}


def arguments_object(text: str) -> dict[str, Any]:
    """A call's arguments as templates want them. Raises ValueError if they are no JSON object."""
    value = _DECODER.decode(text) if text.strip() else {}
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return cast(dict[str, Any], value)
