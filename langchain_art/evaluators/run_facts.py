"""Steps, actions, errors, seconds and answer of a run, from its turns.

Excluded turns (`Turn.excluded_because`) count for `seconds` only: a retry takes time, but is no
step of the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from langchain_art.evaluators.transcript import text_of, tool_calls
from langchain_art.wire import Message, Trajectory, Turn

#: How LangGraph's ``ToolNode`` begins the result of a tool that raised, or that does not exist.
_TOOL_ERRORS = ("Error: ", "Error invoking tool ", "Error executing tool ")


def steps(run: Trajectory) -> int:
    """Model calls of the run."""
    return len(_kept(run))


def actions(run: Trajectory) -> list[str]:
    """Names of the tools that the run called, in order, each as often as it was called."""
    return [name for turn in _kept(run) for name, _ in tool_calls(turn.reply)]


def errors(run: Trajectory) -> int:
    """The number of errors in the run.

    Model calls that ended in an error, tool calls whose arguments are no JSON object, and tool
    results that begin as LangGraph's ``ToolNode`` begins an error (``Error: …``, ``Error invoking
    tool …``, ``Error executing tool …``).
    """
    turns = _kept(run)
    failed = sum(turn.error is not None for turn in turns)
    malformed = sum(not _is_object(text) for turn in turns for _, text in tool_calls(turn.reply))
    refused = sum(
        message.get("role") == "tool" and text_of(message.get("content")).startswith(_TOOL_ERRORS)
        for message in _messages(run, turns)
    )
    return failed + malformed + refused


def seconds(run: Trajectory) -> float:
    """Seconds from the start of the first model call to the end of the last one.

    If start times are missing, the sum of the known latencies; 0.0 if none is known.
    """
    timed = [(t.started_at, t.latency or 0.0) for t in run.turns if t.started_at is not None]
    if timed and len(timed) == len(run.turns):
        return max(map(sum, timed)) - min(timed)[0]
    return sum(turn.latency or 0.0 for turn in run.turns)


def answer(run: Trajectory) -> Any:
    """The run's answer.

    Of an output with ``messages``, the text of the last message; any other output unchanged;
    without an output, the text of the last reply, or None.
    """
    output = run.output
    if isinstance(output, Mapping) and "messages" in output:
        messages = output["messages"]
        return text_of(messages[-1].get("content")) if messages else None
    if output is not None:
        return output
    replies = [turn.reply for turn in _kept(run) if turn.reply is not None]
    return text_of(replies[-1].get("content")) if replies else None


def _kept(run: Trajectory) -> list[Turn]:
    return [turn for turn in run.turns if turn.excluded_because is None]


def _messages(run: Trajectory, turns: list[Turn]) -> Iterator[Message]:
    """Messages between the replies, and tool results in the output after the last reply."""
    for turn in turns:
        yield from turn.messages
    output = run.output
    if isinstance(output, Mapping) and "messages" in output:
        last: list[Message] = output["messages"][::-1]
        yield from takewhile(lambda message: message.get("role") == "tool", last)


def _is_object(arguments: Any) -> bool:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return False
    return isinstance(arguments, dict)
