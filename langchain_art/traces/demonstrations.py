"""The conversations of a trace, each once, for supervised steps."""

from __future__ import annotations

from typing import Any

from langchain_art.traces.stored import StoredCall, StoredTrace
from langchain_art.wire import Message


def conversations(trace: StoredTrace) -> list[dict[str, Any]]:
    """A trace's calls as conversations in OpenAI's format, as `read_conversations` takes them.

    A call whose prompt and reply are the beginning of a later call's prompt is part of that one.
    In the longer one its reply is learned, too; other replies in a prompt (of earlier sessions, of
    a summary, of attempts that the graph discarded) are context: their ``weight`` is 0.
    """
    calls = [call for call in trace.calls if call.excluded_because is None]
    whole = [[*call.messages, call.reply] for call in calls]
    found: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        if not any(_begins(whole[index], other, call) for other in calls[index + 1 :]):
            found.append(_written(call, whole))
    return found


def _begins(messages: list[Message], other: StoredCall, call: StoredCall) -> bool:
    """Whether the messages are the beginning of another call's prompt, with the same tools."""
    same_tools = list(other.tools) == list(call.tools)
    return same_tools and list(other.messages[: len(messages)]) == messages


def _written(call: StoredCall, whole: list[list[Message]]) -> dict[str, Any]:
    messages: list[Message] = []
    shown = [*call.messages, call.reply]
    for index, message in enumerate(shown):
        sampled = shown[: index + 1] in whole
        context = message["role"] == "assistant" and not sampled
        messages.append({**message, "weight": 0} if context else message)
    return {"messages": messages, **({"tools": list(call.tools)} if call.tools else {})}
