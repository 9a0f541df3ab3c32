"""Calls whose arguments are one JSON object. They keep the model's own words."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn, cast

from langchain_art_server.backends.chat.tool_calls.call_format import FunctionCall, Schemas, overlap

_SPACE = re.compile(r"[ \t\r\n]*")
_KIMI = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)
#: Tokens before and after a call, and after its name.
KIMI_CALL, KIMI_NAME = ("<|tool_call_begin|>", "<|tool_call_end|>"), "<|tool_call_argument_begin|>"
DEEPSEEK_CALL, DEEPSEEK_NAME = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"), "<｜tool▁sep｜>"
_DEEPSEEK_V3 = re.compile(f"function{DEEPSEEK_NAME}([^\\n]+)\\n```json\\n(.*)\\n```\\s*", re.DOTALL)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text} overflows to infinity")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def decode(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, for NaN, Infinity and 1e400 too."""
    return _DECODER.decode(text)


def arguments_object(text: str) -> dict[str, Any]:
    """A call's arguments as templates want them. Raises ValueError if they are no JSON object."""
    value = decode(text) if text.strip() else {}
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return cast(dict[str, Any], value)


def checked_name(name: Any) -> str:
    """The name of a function. Raises ValueError if it can be none."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError("expected a name")
    return name


def one_object(text: str, _schemas: Schemas) -> list[FunctionCall]:
    """``{"name": …, "arguments": {…}}``."""
    call, end = _call_at(text, _skip(text, 0))
    if end < len(text):
        raise ValueError("expected one call")
    return [call]


def objects(text: str, schemas: Schemas) -> list[FunctionCall]:
    """The whole reply: ``{"name": …, "parameters": {…}}``, several separated by ``;``.

    Or ``functools[…]``, as vLLM's template, which writes objects itself, asks of Phi-4-mini.
    """
    text = text.strip().removeprefix("<|python_tag|>")
    if text.startswith("functools"):
        return array(text.removeprefix("functools"), schemas)
    calls: list[FunctionCall] = []
    at = _skip(text, 0)
    while at < len(text):
        call, at = _call_at(text, at)
        calls.append(call)
        if text[at : at + 1] == ";":
            at = _skip(text, at + 1)
    return calls


def array(text: str, schemas: Schemas) -> list[FunctionCall]:
    """``[{"name": …, "arguments": {…}}, …]``, or one such object alone."""
    if text[_skip(text, 0) :].startswith("{"):
        return one_object(text, schemas)
    calls: list[FunctionCall] = []
    at = _skip(text, 0)
    while text[at : at + 1] == ("," if calls else "["):
        call, at = _call_at(text, _skip(text, at + 1))
        calls.append(call)
    if not calls or text[at : at + 1] != "]" or _skip(text, at + 1) < len(text):
        raise ValueError("expected an array of calls")
    return calls


def mistral(text: str, schemas: Schemas) -> list[FunctionCall]:
    """An `array`, or ``name[ARGS]{…}``, then ``[TOOL_CALLS]`` before each further one."""
    calls: list[FunctionCall] = []
    for part in text.split("[TOOL_CALLS]"):
        name, mark, arguments = part.partition("[ARGS]")
        name, _, id_ = name.partition("[CALL_ID]")
        if not mark and "[" not in part.partition("{")[0]:  # `name{…}`, from version 11 on
            name, _, rest = part.partition("{")
            mark, arguments = "{", "{" + rest
        calls += [_call(name, arguments, id_.strip())] if mark else array(part, schemas)
    return calls


def kimi(text: str, _schemas: Schemas) -> list[FunctionCall]:
    """``functions.name:0``, a mark, the arguments; each between marks of its own."""
    calls: list[FunctionCall] = []
    for part in _between(text, *KIMI_CALL):
        id_, mark, arguments = part.partition(KIMI_NAME)
        name = _KIMI.fullmatch(id_.strip())
        if not mark or name is None:
            raise ValueError("expected a name and arguments")
        calls.append(_call(name[1], arguments, id_.strip()))
    return calls


def deepseek_v3(text: str, _schemas: Schemas) -> list[FunctionCall]:
    """The word ``function``, a mark, the name, and the arguments as a block of JSON."""
    calls: list[FunctionCall] = []
    for part in _between(text, *DEEPSEEK_CALL):
        found = _DEEPSEEK_V3.fullmatch(part)
        if found is None:
            raise ValueError("expected a name and a block of JSON")
        calls.append(_call(found[1], found[2]))
    return calls


def deepseek_v31(text: str, _schemas: Schemas) -> list[FunctionCall]:
    """The name, a mark, the arguments; each between marks of its own."""
    calls: list[FunctionCall] = []
    for part in _between(text, *DEEPSEEK_CALL):
        name, _, arguments = part.partition(DEEPSEEK_NAME)
        calls.append(_call(name, arguments))
    return calls


def harmony(text: str, _schemas: Schemas) -> list[FunctionCall]:
    """Parse a call as `HarmonyRewriter` writes it: the name, a mark, the arguments."""
    name, _, arguments = text.partition("<|message|>")
    return [_call(name, arguments)]


def _between(text: str, begin: str, end: str) -> list[str]:
    first, *parts = text.split(begin)
    if first.strip() or not parts or not all(part.rstrip().endswith(end) for part in parts):
        raise ValueError(f"expected calls between {begin!r} and {end!r}")
    return [part.rstrip().removesuffix(end) for part in parts]


def _call(name: str, arguments: str, id_: str = "") -> FunctionCall:
    arguments_object(arguments)
    if not arguments.strip():
        raise ValueError("expected arguments")
    return FunctionCall(checked_name(name.strip()), arguments.strip(), id_)


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
    name = checked_name(members.get("name", (None, ""))[0])
    value, raw = members.get("arguments") or members.get("parameters") or (None, "")
    if not isinstance(value, dict):
        raise ValueError("expected an object of arguments")
    id_ = members.get("id", ("", ""))[0]
    return FunctionCall(name, raw, id_ if isinstance(id_, str) else ""), _skip(text, end)


HARMONY_MARKERS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
)
_MARK = re.compile("|".join(map(re.escape, HARMONY_MARKERS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
#: What a kind of message ends with once it is rewritten.
_ENDS = {"think": "</think>", "call": "<|call|>", "text": ""}


class HarmonyRewriter:
    """Rewrites one reply; it begins after ``<|start|>assistant``."""

    def __init__(self) -> None:
        self._held = self._header = self._kind = ""

    def push(self, text: str, *, last: bool) -> str:
        """Add text; returns what is final. Markers that may be incomplete are held back."""
        text = self._held + text
        keep = 0 if last else max(overlap(text, marker) for marker in HARMONY_MARKERS)
        text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        written, at = "", 0
        for mark in _MARK.finditer(text):
            written += self._text(text[at : mark.start()]) + self._mark(mark[0])
            at = mark.end()
        written += self._text(text[at:])
        if last:  # the token that ends a call ends the reply, and is not part of its text
            written += "<|call|>" if self._kind == "call" else self._header
            self._header = ""
        return written

    def _text(self, text: str) -> str:
        if self._kind:
            return text
        self._header += text
        return ""

    def _mark(self, mark: str) -> str:
        if self._kind:  # in a message's body, any mark ends it
            ended, self._kind, self._header = _ENDS[self._kind], "", ""
            return ended
        if mark != "<|message|>":
            self._header = "" if mark in ("<|start|>", "<|end|>") else self._header + mark
            return ""
        header, self._header = self._header, ""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient:
            self._kind = "call"
            return f"<|channel|>{recipient[1]}<|message|>"
        self._kind = "think" if channel and channel[1] == "analysis" else "text"
        return "<think>" if self._kind == "think" else ""
