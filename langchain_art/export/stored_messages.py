"""Messages as trace stores keep them, read back in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_art.wire import Message

#: LangChain's names of roles, and OpenAI's.
_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant"}
#: The parts of a message that a chat template shows.
_KEPT = ("role", "content", "tool_calls", "tool_call_id", "name")


def decoded(value: Any) -> Any:
    """The value of a JSON text; another text as it is. Langfuse gives both as texts."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def text_in(value: Any) -> str | None:
    """A text of metadata that is not empty, which may have come back as JSON; else None."""
    found = decoded(value)
    return found if isinstance(found, str) and found else None


def message_of(stored: Mapping[str, Any]) -> Message:
    """A message in OpenAI's shape.

    Tool calls may be LangChain's (``{"name", "args", "id"}``), and roles, too (``human``, ``ai``).

    Raises:
        ValueError: it has no role.
    """
    role = stored.get("role") or stored.get("type")
    if not isinstance(role, str):
        raise ValueError(f"got a message without a role: {stored!r:.200}")
    message = {name: stored[name] for name in _KEPT if stored.get(name) is not None}
    message["role"] = _ROLES.get(role, role)
    if not message.get("tool_calls"):  # LangChain writes an empty list
        message.pop("tool_calls", None)
    message.setdefault("content", None if stored.get("tool_calls") else "")
    if calls := stored.get("tool_calls"):
        message["tool_calls"] = [_tool_call(one) for one in calls]
    return message


def reply_of(stored: Any) -> Message:
    """An assistant's message: of a mapping, of its JSON, or of a text that is its content.

    Raises:
        ValueError: it is another role's message.
    """
    value = decoded(stored)
    if not (isinstance(value, Mapping) and ({"role", "content", "tool_calls"} & set(value))):
        content = stored if isinstance(stored, str) else json.dumps(value, ensure_ascii=False)
        return {"role": "assistant", "content": content}
    message = message_of({"role": "assistant", **value})
    if message["role"] != "assistant":
        raise ValueError(f"got a message of {message['role']!r}, expected the assistant's")
    return message


def prompt_of(stored: Any) -> tuple[list[Message], list[dict[str, Any]]]:
    """The messages of a stored prompt, and the definitions of its tools.

    Langfuse's callback handler puts each definition among the messages, as a tool's message whose
    content is the definition, without ``tool_call_id``; they are distinguished here.

    Raises:
        ValueError: there are no messages in it.
    """
    value = decoded(stored)
    tools: list[dict[str, Any]] = []
    if isinstance(value, Mapping):
        tools = list(value.get("tools") or ())
        value = value.get("messages")
    if isinstance(value, str):
        return [{"role": "user", "content": value}], tools
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"got no messages in {stored!r:.200}")
    messages: list[Message] = []
    for one in value:
        if not isinstance(one, Mapping):
            raise ValueError(f"got {one!r:.200} among the messages")
        if _defines_a_tool(one):
            tools.append(dict(decoded(one["content"])))
        else:
            messages.append(message_of(one))
    if not messages:
        raise ValueError(f"got no messages in {stored!r:.200}")
    return messages, tools


def _defines_a_tool(message: Mapping[str, Any]) -> bool:
    if message.get("role") != "tool" or message.get("tool_call_id"):
        return False
    content = decoded(message.get("content"))
    return isinstance(content, Mapping) and "function" in content


def _tool_call(stored: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in stored:
        return dict(stored)
    arguments = stored.get("args", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": stored["name"], "arguments": written}
    return {"id": stored.get("id"), "type": "function", "function": function}
