"""How a chat template wants its messages, and what it shows of them: found by rendering."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, cast

from jinja2 import TemplateError

from langchain_art.errors import InvalidRequest
from langchain_art.wire.prefixes import common_prefix_length
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
_USER = {"role": "user", "content": "x"}
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
    """

    def __init__(self, render: Render, template: str, turn_end: re.Pattern[str]) -> None:
        self._knows_developer = "developer" in template  # OpenAI's newer name of the system role
        fields = (f for f in _THOUGHT_FIELDS if re.search(_READS.format(f), template))
        self._thought_field = next(fields, None)
        self._calls_as_text = False
        self.shows_calls, self.unknown = True, ""
        self.shows_tools = self._probe_tools(render)
        self.tools: ToolFormat | None = self._probe_calls(render, turn_end)

    def shaped(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        """Message `index`: content is a string, arguments are an object or JSON.

        Raises:
            InvalidRequest: it has parts, calls or arguments that cannot be shown.
        """
        shown = dict(message, content=_plain(index, message.get("content")))
        if message.get("tool_calls"):
            if not self.shows_calls:
                raise InvalidRequest(
                    f"messages[{index}].tool_calls: got {len(message['tool_calls'])}, and this "
                    "model's chat template shows no tool calls; expected messages without them. "
                    "Write them as text, or save the tokenizer with a `chat_template` that shows "
                    "them.",
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
        return shown

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

    def _probe_tools(self, render: Render) -> bool:
        for dialog in ([_USER], [{"role": "system", "content": "y"}, _USER]):
            try:
                if _NAME in render(dialog, [_TOOL], reply=False):
                    return True
            except RENDER_ERRORS:
                continue
        return False

    def _probe_calls(self, render: Render, turn_end: re.Pattern[str]) -> ToolFormat | None:
        """How the template writes a call.

        Some take its arguments as an object, some as JSON; some write its id in place of its name.
        """
        shown: list[bool] = []
        refusals: list[str] = []
        for self._calls_as_text, id_ in itertools.product((False, True), _IDS):
            arguments = _AS_TEXT if self._calls_as_text else {_KEY: _VALUE}
            call = {"id": id_, "type": "function"}
            call |= {"function": {"name": _NAME, "arguments": arguments}}
            reply = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                text = render([_USER, reply], [], reply=True)
                before = [render([_USER], [], reply=is_reply) for is_reply in (False, True)]
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


def _plain(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(cast(list[Any], content) if isinstance(content, list) else [content]):
        if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidRequest(
                f"messages[{index}].content[{i}]: got a part of type {kind!r}, expected 'text': "
                "this model reads text only.",
                param=f"messages[{index}].content",
            )
        if not isinstance(part["text"], str):
            raise InvalidRequest(
                f"messages[{index}].content[{i}].text: got {part['text']!r}, expected a string.",
                param=f"messages[{index}].content",
            )
        texts.append(part["text"])
    return "".join(texts)
