"""Messages of text in OpenAI's format, as `ChatART` sends them and `tracing` records them.

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
)

from langchain_art.wire import Message

_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    AIMessageChunk: "assistant",
    ToolMessage: "tool",
}
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
