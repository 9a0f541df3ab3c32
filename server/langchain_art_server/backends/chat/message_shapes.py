"""Probe of a chat template's message shapes, and of what it shows: found by rendering."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from typing import Any, cast

from jinja2 import TemplateError

from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art.wire.turn_links import common_prefix_length
from langchain_art_server.backends.chat.tool_calls.call_format import ToolFormat
from langchain_art_server.backends.chat.tool_calls.formats import HARMONY, format_of_call
from langchain_art_server.backends.chat.tool_calls.json_calls import arguments_object

#: What a template raises that cannot show messages.
RENDER_ERRORS = (TemplateError, TypeError, ValueError, AttributeError, KeyError)
_THOUGHT_END = "</think>"
#: Fields of a message that templates read what was thought from.
_THOUGHT_FIELDS = ("reasoning_content", "thinking")
_READS = r"""\.{0}\b|['"]{0}['"]"""
_NAME, _KEY, _VALUE = "lookup_probe", "probe_key", "probe value"
#: Mistral's templates take nine letters and digits; Kimi K2's write the id alone.
_IDS = ("probe1234", f"functions.{_NAME}:0")
_AS_TEXT = f'{{"{_KEY}": "{_VALUE}"}}'
#: A conversation that ends with a message of the role, or has one before the user's.
_SHORT: dict[str, tuple[str, ...]] = {
    "user": ("user",),
    "system": ("system", "user"),
    "developer": ("developer", "user"),
    "assistant": ("user", "assistant"),
    "tool": ("user", "call", "tool"),
}
_LONG: tuple[tuple[str, ...], ...] = (
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "system", "user"),
    ("user", "assistant", "developer", "user"),
    ("user", "call", "tool", "assistant", "user"),
)
_FIRST = ("system", "developer")  # roles whose message some templates show at the beginning alone
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Look it up.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "What."}},
            "required": [_KEY],
        },
    },
}

Render = Callable[..., str]


class MessageShapes:
    """Brings messages into the shape that one template wants.

    Args:
        render: of the tokenizer: messages, tools and whether the reply is there -> text.
        template: its source.
        turn_end: what ends a turn.

    Attributes:
        shows_tools: the template shows a request's tools to the model.
        shows_calls: it shows the model's earlier tool calls.
        tools: how it writes tool calls; None: not known here.
        unknown: why it is not known: what the template does, as the end of a sentence.

    Raises:
        ConfigError: the template shows no message of the user, or leaves out the model's replies.
    """

    def __init__(self, render: Render, template: str, turn_end: re.Pattern[str]) -> None:
        self._knows_developer = "developer" in template  # OpenAI's newer name of the system role
        fields = (f for f in _THOUGHT_FIELDS if re.search(_READS.format(f), template))
        self._thought_field = next(fields, None)
        self._render = render
        self._roles = [one for one in _SHORT if one != "developer" or self._knows_developer]
        self._calls_as_text = False
        #: Roles whose content the template wants in parts, without and with tools; and those whose
        #: content it leaves out, at the beginning (True) or later.
        self._in_parts = set[tuple[str, bool]]()
        self._lost = set[tuple[str, bool, bool]]()
        self._refusal = ""
        for role in self._roles[:-1]:
            self._probe_shape(role)
        self.shows_calls, self.unknown = True, ""
        self.shows_tools = self._probe_tools()
        self.tools: ToolFormat | None = self._probe_calls(turn_end)
        self._probe_shape("tool")
        self._probe_content()

    def shaped(self, index: int, message: dict[str, Any], *, tools: bool) -> dict[str, Any]:
        """Message `index` of a request, with `tools` or without.

        Its content is a string or a list of parts, arguments are an object or JSON.

        Raises InvalidRequest: it has parts, calls or arguments that cannot be shown, or a role that
        the template leaves out.
        """
        parts = _parts_of(index, message.get("content"))
        texts = [part["text"] for part in parts if "text" in part]
        shown = dict(message, content="".join(texts))
        if message.get("tool_calls"):
            if not self.shows_calls:
                raise InvalidRequest(
                    f"messages[{index}].tool_calls: got {len(message['tool_calls'])}, and this "
                    "model's chat template shows no tool calls; expected messages without them. "
                    "Start the server with --chat-template tools, which shows them as text.",
                    param=f"messages[{index}].tool_calls",
                )
            shown["tool_calls"] = [
                self._call(f"messages[{index}].tool_calls[{i}]", call)
                for i, call in enumerate(message["tool_calls"])
            ]
        else:
            shown.pop("tool_calls", None)
        if shown.get("role") == "developer" and not self._knows_developer:
            shown["role"] = "system"
        self._move_thought(shown)
        if shown["content"] and (why := self._why_lost(shown, index, tools)):
            raise InvalidRequest(f"messages[{index}]: {why}", param=f"messages[{index}]")
        if len(texts) < len(parts):
            shown["content"] = parts
        elif (shown.get("role"), tools) in self._in_parts:
            said = texts if shown["content"] == "".join(texts) else [shown["content"]]
            shown["content"] = _parts(*said)
        return shown

    def _why_lost(self, shown: dict[str, Any], index: int, tools: bool) -> str:
        """Reason why the template does not show a message; empty if it does."""
        role = str(shown.get("role"))
        first = role not in _FIRST or index == 0
        if (role, tools, first) not in self._lost:
            return ""
        where = " with tools" if tools and (role, False, first) not in self._lost else ""
        if first or (role, tools, True) in self._lost:
            what, instead = f"leaves out a message of the role {role!r}{where}", "another role"
        else:
            what = f"shows one of the role {role!r} as the first message alone{where}"
            instead = "it there, or another role"
        return (
            f"this model's chat template {what}, so the model would not see it; expected {instead}."
        )

    def _move_thought(self, shown: dict[str, Any]) -> None:
        """Give what was thought in the template's own field, which decides whether it shows it."""
        field = self._thought_field
        if shown.get("role") != "assistant" or field is None or field in shown:
            return
        thought, end, content = shown["content"].rpartition(_THOUGHT_END)
        if not end:
            return
        shown[field] = thought.lstrip().removeprefix("<think>").strip("\n")
        shown["content"] = content.lstrip("\n")
        if self.tools is HARMONY and shown.get("tool_calls"):  # one of both before a call
            shown[field] = "\n".join(filter(None, (shown[field], shown["content"])))
            shown["content"] = ""

    def _call(self, where: str, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments", "")
        if isinstance(arguments, str):
            try:
                value = arguments_object(arguments)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(
                    f"{where}.function.arguments is not a JSON object: {error}. Send the arguments "
                    "as the model gave them.",
                    param=where,
                ) from error
            function["arguments"] = arguments if self._calls_as_text else value
        return {**call, "function": function}

    def _lost_of(self, roles: tuple[str, ...], *, tools: bool) -> set[tuple[str, bool]] | None:
        """Roles whose content is lost from a conversation, each with whether it is at its place.

        None: the template refuses the conversation.
        """
        for id_ in _IDS if "call" in roles else _IDS[:1]:
            said = [
                self._probe(role, f"probed{at}content", id_, tools) for at, role in enumerate(roles)
            ]
            try:
                text = self._render(said, [_TOOL] * tools, reply=roles[-1] == "assistant")
            except RENDER_ERRORS as error:
                why = str(error).strip() or type(error).__name__
                self._refusal = self._refusal or why.splitlines()[0]
                continue
            return {
                (role, role not in _FIRST or at == 0)
                for at, role in enumerate(roles)
                # A part that is written as Python or JSON writes it is not shown.
                if role != "call"
                and not re.search(rf"(?<!text['\"]: ['\"])probed{at}content", text)
            }
        return None

    def _probe(self, role: str, text: str, id_: str, tools: bool) -> dict[str, Any]:
        """A message of a role, in the shape that is known by now."""
        if role == "call":
            arguments = _AS_TEXT if self._calls_as_text else {_KEY: _VALUE}
            function = {"name": _NAME, "arguments": arguments}
            call = {"id": id_, "type": "function", "function": function}
            shown = self._probe("assistant", "", id_, tools)
            return shown | {"tool_calls": [call]}
        shown: dict[str, Any] = {"role": role, "content": text}
        if (role, tools) in self._in_parts:
            shown["content"] = _parts(text)
        return shown | {"tool_call_id": id_, "name": _NAME} if role == "tool" else shown

    def _probe_shape(self, role: str) -> None:
        """Find out whether a role's content is wanted in parts, without tools and with them."""
        for tools in (False, True):
            as_text = self._lost_of(_SHORT[role], tools=tools)
            if as_text is not None and (role, True) not in as_text:
                continue
            self._in_parts.add((role, tools))
            in_parts = self._lost_of(_SHORT[role], tools=tools)
            # Of a refusal and a loss, the refusal: it says what is wrong.
            refused = in_parts is None and as_text is not None
            if not refused and (in_parts is None or (role, True) in in_parts):
                self._in_parts.discard((role, tools))

    def _probe_content(self) -> None:
        """Find the roles whose content is lost. Raises ConfigError: those without which none is."""
        refuses, known = True, {*self._roles, "call"}
        probes = [roles for roles in (*_SHORT.values(), *_LONG) if known.issuperset(roles)]
        for tools in (False, True)[: 1 + self.shows_tools]:
            for roles in probes:
                if (lost := self._lost_of(roles, tools=tools)) is not None:
                    self._lost |= {(role, tools, first) for role, first in lost}
                    refuses = refuses and tools
        for role in ("user", "assistant"):
            lost = (role, False, True) in self._lost
            if lost or refuses:
                why = (
                    f"refuses every conversation ({self._refusal})" if refuses else "leaves it out"
                )
                raise ConfigError(
                    f"The model's chat template does not show what a message of the role {role!r} "
                    f"says: it {why}. Correct `chat_template` in the tokenizer's files, or use "
                    "another model."
                )

    def _probe_tools(self) -> bool:
        for roles in _SHORT["user"], _SHORT["system"]:
            said = [self._probe(role, "x", _IDS[0], True) for role in roles]
            with contextlib.suppress(*RENDER_ERRORS):
                if _NAME in self._render(said, [_TOOL], reply=False):
                    return True
        return False

    def _probe_calls(self, turn_end: re.Pattern[str]) -> ToolFormat | None:
        """Probe the notation in which the template writes a call.

        Some take its arguments as an object, some as JSON; some write its id in place of its name.
        """
        shown: list[bool] = []
        refusals: list[str] = []
        for self._calls_as_text, id_ in itertools.product((False, True), _IDS):
            user, reply = (self._probe(role, "x", id_, False) for role in ("user", "call"))
            try:
                text = self._render([user, reply], [], reply=True)
                before = [self._render([user], [], reply=is_reply) for is_reply in (False, True)]
            except RENDER_ERRORS as error:
                refusals.append(str(error))
                continue
            shown.append(_NAME in text)
            for one in before:  # a prompt may begin the reply in other words than the past has
                added = text[common_prefix_length(one, text) :]
                end = turn_end.search(added)
                added = added[: end.start()] if end else added
                if form := format_of_call(added, _NAME, {_KEY: _VALUE}):
                    return form
        self._calls_as_text = False
        self.shows_calls = any(shown) or not shown  # one that refuses a call does not leave it out
        if not shown:
            self.unknown = f"refuses tool calls ({refusals[0]})"
        elif self.shows_calls:
            self.unknown = (
                "writes tool calls in a format that is not known here, so they would stay text"
            )
        else:
            self.unknown = "does not write tool calls, so the model would not see its earlier ones"
        return None


def _parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def _parts_of(index: int, content: Any) -> list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return _parts(content or "")
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(cast(list[Any], content) if isinstance(content, list) else [content]):
        if isinstance(part, dict) and part.get("type") == "image" and "sha256" in part:
            parts.append({"type": "image"})
            continue
        if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidRequest(
                f"messages[{index}].content[{i}]: got a part of type {kind!r}, expected 'text' or "
                "an image.",
                param=f"messages[{index}].content",
            )
        if not isinstance(part["text"], str):
            raise InvalidRequest(
                f"messages[{index}].content[{i}].text: got {part['text']!r}, expected a string.",
                param=f"messages[{index}].content",
            )
        parts += _parts(part["text"])
    return parts
