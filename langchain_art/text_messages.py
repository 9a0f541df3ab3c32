"""Messages in OpenAI's format: those of text as `ChatART` sends them, all as they are recorded.

A prompt repeats all earlier messages of an agent, and nearly all are text and tool calls.
LangChain's own conversions (one for requests, one for other uses) check each for every kind of
content, and take longer. They remain for all other messages.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_openai_messages,
)

from langchain_art.wire import Message

_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    AIMessageChunk: "assistant",
    ToolMessage: "tool",
}
# Content blocks of assistants, by LangChain's names and those of providers.
_REASONING = ("reasoning", "thinking")
_CALLS = ("tool_call", "tool_call_chunk", "invalid_tool_call", "function_call")
_json = json.JSONEncoder(ensure_ascii=False).encode


def text_message(message: BaseMessage) -> Message | None:
    """A message of text in OpenAI's format; None if it is not only text and tool calls.

    None also for tool calls whose arguments could not be parsed, subclasses, and messages with
    `additional_kwargs` other than the reasoning of a reply. A tool's name is left out: the tool
    call has it.

    Raises:
        TypeError, ValueError: arguments of a tool call have no JSON form.
    """
    role, content, more = _ROLES.get(type(message)), message.content, message.additional_kwargs
    if role is None or not isinstance(content, str):
        return None
    if type(message) is ToolMessage:  # `isinstance` takes longer, if it is none
        call = message.tool_call_id
        return None if more else {"role": role, "tool_call_id": call, "content": content}
    wire: Message = {"role": role}
    if message.name:
        wire["name"] = message.name
    if not isinstance(message, AIMessage):
        wire["content"] = content
        return None if more else wire
    if message.invalid_tool_calls or (more and more.keys() != {"reasoning_content"}):
        return None
    if message.tool_calls:
        wire["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": _arguments(call["args"])},
            }
            for call in message.tool_calls
        ]
    wire["content"] = content or (None if message.tool_calls else "")
    if reasoning := more.get("reasoning_content"):
        wire["reasoning_content"] = reasoning
    return wire


def _arguments(args: dict[str, Any]) -> str:
    """A tool call's arguments as `json.dumps` writes them; texts alone in a third of its time."""
    fields: list[str] = []
    for name, value in args.items():
        if type(name) is not str or type(value) is not str:
            return _json(args)
        fields.append(f"{encode_basestring(name)}: {encode_basestring(value)}")
    return f"{{{', '.join(fields)}}}"


def openai_message(message: BaseMessage) -> Message:
    """A LangChain message in OpenAI's format, as JSON values.

    Reasoning, and tool calls whose arguments could not be parsed, are kept as the model wrote them.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: LangChain cannot convert it.
    """
    if (text := text_message(message)) is not None:
        return text
    form = "block" if isinstance(message.content, list) else "string"
    return completed(convert_to_openai_messages(message, text_format=form), message)


def completed(wire: Message, message: BaseMessage) -> Message:
    """LangChain's conversion of a message, with what it lacks and without what is not sent."""
    if isinstance(message, ToolMessage):
        wire.pop("name", None)  # the tool call has it
    if isinstance(message, AIMessage):
        if isinstance(wire["content"], list):
            _reduce_blocks(wire)
        if reasoning := message.additional_kwargs.get("reasoning_content"):
            wire["reasoning_content"] = reasoning
        for call in message.invalid_tool_calls:
            function = {"name": call["name"], "arguments": call["args"]}
            wire.setdefault("tool_calls", []).append(
                {"type": "function", "id": call["id"], "function": function}
            )
        if "tool_calls" in wire:
            wire["content"] = wire["content"] or None  # as OpenAI's format has it
    return wire


def _reduce_blocks(wire: Message) -> None:
    """Move reasoning out of an assistant's content blocks, and drop its tool calls from them."""
    blocks: list[dict[str, Any]] = []
    for block in wire["content"]:
        kind = block.get("type")
        if kind in _REASONING:
            if isinstance(text := block.get(kind), str) and text:
                wire["reasoning_content"] = wire.get("reasoning_content", "") + text
        elif kind not in _CALLS:
            blocks.append(block)
    wire["content"] = blocks
