r"""Tool calls in what a model says: found, cut out of the text, and written as a grammar.

Three formats are known; which one a model speaks is read off its chat template:

* ``hermes`` (Qwen, Hermes): ``<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>``
* ``mistral``: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}``
* ``llama``: the whole reply is ``{"name": …, "parameters": {…}}``, several separated by ``;``

The arguments keep the model's own text, so that a history with them renders as it was sampled. What
is not a well-formed call stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any, NoReturn, cast

_SPACE = re.compile(r"[ \t\r\n]*")
_ARGS = "[ARGS]"


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        name: ``hermes``, ``mistral`` or ``llama``.
        opener: what a call begins with; empty if a reply is a call as a whole.
        closer: what it ends with; empty if only the reply's end does.
        markers: tokens that must survive decoding even if the tokenizer calls them special.
    """

    name: str
    opener: str
    closer: str
    markers: tuple[str, ...]
    arguments: str = "arguments"


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", ("<tool_call>", "</tool_call>"))
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", ("[TOOL_CALLS]", _ARGS))
LLAMA = ToolFormat("llama", "", "", ("<|python_tag|>",), "parameters")
#: Name -> format.
FORMATS = {form.name: form for form in (HERMES, MISTRAL, LLAMA)}
#: What a template contains -> the format, first match first.
_TABLE = (
    (("<tool_call>", '"arguments"'), HERMES),
    (("[TOOL_CALLS]",), MISTRAL),
    (('"parameters"',), LLAMA),
    (("<|python_tag|>",), LLAMA),
)


def tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template speaks; None if it is none of the known ones."""
    plain = template.replace('\\"', '"')
    for parts, found in _TABLE:
        if all(part in plain for part in parts):
            return found
    return None


class ReplyParser:
    """Splits a reply into text and tool calls, fed piece by piece.

    The pieces' sizes change nothing: what `feed` and `finish` return, put together, is the same.
    White space next to a call is dropped; text that may be the beginning of a call is held back.
    """

    def __init__(self, form: ToolFormat | None, *, one_call: bool = False) -> None:
        """`one_call`: only the first call counts, further ones are left out of the reply."""
        self._form, self._one_call = form, one_call
        self._buffer = ""
        self._space = ""
        self._after_call = self._spoke = False
        self.calls: list[dict[str, Any]] = []
        self.content = ""

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Take more text; returns the text and the calls that are certain now."""
        before, calls = len(self.content), len(self.calls)
        if self._form is None:
            self._buffer, self.content = "", self.content + self._buffer + text
        else:
            self._buffer += text
            self._scan(self._form)
        return self.content[before:], self.calls[calls:]

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The reply is over; returns what was held back."""
        before, calls = len(self.content), len(self.calls)
        rest, self._buffer = self._buffer, ""
        form = self._form
        if form is not None:
            found = None
            if form is MISTRAL and rest.startswith(form.opener):
                found = _mistral_calls(rest)
            elif form is LLAMA:
                found = _llama_calls(rest)
            if found:
                self._called(found)
            elif rest:
                self._say(rest)
            if not self._after_call:
                self.content += self._space
        return self.content[before:], self.calls[calls:]

    def _scan(self, form: ToolFormat) -> None:
        if not form.opener:
            # A reply in Llama's format is a call from its first character on, or not at all.
            start = self._buffer.lstrip()
            tag = form.markers[0]
            if self._spoke or not (start[:1] in ("", "{") or start.startswith(tag[: len(start)])):
                self._say_all()
            return
        while True:
            at = self._buffer.find(form.opener)
            if at < 0:
                keep = _overlap(self._buffer, form.opener)
                cut = len(self._buffer) - keep
                self._say(self._buffer[:cut])
                self._buffer = self._buffer[cut:]
                return
            self._say(self._buffer[:at])
            self._buffer = self._buffer[at:]
            end = _closer(self._buffer, form) if form.closer else -1
            if end < 0:
                return
            raw, self._buffer = self._buffer[:end], self._buffer[end:]
            call = _json_call(raw[len(form.opener) : -len(form.closer)])
            if call is None:
                self._say(raw)
            else:
                self._called([call])

    def _say_all(self) -> None:
        self._say(self._buffer)
        self._buffer = ""

    def _say(self, text: str) -> None:
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._spoke = True
            self.content += "\n" + body if self._after_call and self.content else body
            self._after_call = False

    def _called(self, calls: list[tuple[str, str]]) -> None:
        self._space, self._after_call = "", True
        for name, arguments in calls:
            if self.calls and self._one_call:
                return
            function = {"name": name, "arguments": arguments}
            self.calls.append(
                {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
            )


def _overlap(text: str, opener: str) -> int:
    """How many of the last characters of `text` may be the beginning of `opener`."""
    for size in range(min(len(text), len(opener) - 1), 0, -1):
        if opener.startswith(text[-size:]):
            return size
    return 0


def _closer(text: str, form: ToolFormat) -> int:
    """End of the closer that is outside of every JSON string, or -1."""
    inside, escaped, at = False, False, len(form.opener)
    while at < len(text):
        char = text[at]
        if inside:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                inside = False
        elif char == '"':
            inside = True
        elif text.startswith(form.closer, at):
            return at + len(form.closer)
        at += 1
    return -1


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


def _call_at(text: str, at: int) -> tuple[tuple[str, str], int]:
    members, end = _members(text, at)
    name = members.get("name", (None, ""))[0]
    value, raw = members.get("arguments") or members.get("parameters") or (None, "")
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError("expected a name")
    if not isinstance(value, dict):
        raise ValueError("expected an object of arguments")
    return (name, raw), end


def _json_call(body: str) -> tuple[str, str] | None:
    try:
        call, end = _call_at(body, _skip(body, 0))
        return call if _skip(body, end) == len(body) else None
    except (ValueError, RecursionError):
        return None


def _llama_calls(text: str) -> list[tuple[str, str]] | None:
    text = text.strip().removeprefix("<|python_tag|>")
    calls: list[tuple[str, str]] = []
    try:
        at = _skip(text, 0)
        while at < len(text):
            call, at = _call_at(text, at)
            calls.append(call)
            at = _skip(text, at)
            if text[at : at + 1] == ";":
                at = _skip(text, at + 1)
    except (ValueError, RecursionError):
        return None
    return calls


def _mistral_calls(text: str) -> list[tuple[str, str]] | None:
    calls: list[tuple[str, str]] = []
    for part in text.split(MISTRAL.opener)[1:]:
        found = _mistral_part(part)
        if not found:
            return None
        calls += found
    return calls


def _mistral_part(part: str) -> list[tuple[str, str]] | None:
    name, mark, arguments = part.partition(_ARGS)
    if mark:
        wrapped = f'{{"name": {json.dumps(name.strip())}, "arguments": {arguments}}}'
        call = _json_call(wrapped)
        return [call] if call else None
    calls: list[tuple[str, str]] = []
    try:
        at = _skip(part, 0)
        if part[at : at + 1] != "[":
            return None
        at = _skip(part, at + 1)
        while part[at : at + 1] != "]":
            if calls:
                if part[at : at + 1] != ",":
                    return None
                at = _skip(part, at + 1)
            call, at = _call_at(part, at)
            calls.append(call)
            at = _skip(part, at)
    except (ValueError, RecursionError):
        return None
    return calls if _skip(part, at + 1) == len(part) else None


def arguments_object(text: str) -> dict[str, Any]:
    """A call's arguments as templates want them. Raises ValueError if they are no JSON object."""
    value = _DECODER.decode(text) if text.strip() else {}
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return cast(dict[str, Any], value)
