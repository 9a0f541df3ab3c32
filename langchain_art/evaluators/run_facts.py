"""Steps, actions, errors, seconds and answer of a run, from its turns.

Excluded turns (`Turn.excluded_because`) count for `seconds` only: a retry takes time, but is no
step of the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_art.evaluators.transcript import text_of, tool_calls
from langchain_art.wire import Message, Trajectory, Turn

#: How LangGraph's ``ToolNode`` begins the result of a tool that raised, or that does not exist.
TOOL_ERRORS = ("Error: ", "Error invoking tool ", "Error executing tool ")


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
    tool …``, ``Error executing tool …``). A result that several calls were shown counts once.
    """
    turns = _kept(run)
    failed = sum(turn.error is not None for turn in turns)
    malformed = sum(not _is_object(text) for turn in turns for _, text in tool_calls(turn.reply))
    refused: set[tuple[object, str]] = set()
    for place, message in enumerate(_messages(run, turns)):
        text = text_of(message.get("content"))
        if message.get("role") == "tool" and text.startswith(TOOL_ERRORS):
            refused.add((message.get("tool_call_id") or place, text))
    return failed + malformed + len(refused)


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

    Of an output with a list of ``messages``, the text of the last message; any other output
    unchanged; without an output, the text of the last reply, or None.
    """
    messages = _state_messages(run)
    if messages is not None and not messages:
        return None
    if messages:
        last = messages[-1]
        return text_of(last.get("content") if isinstance(last, Mapping) else last)
    if run.output is not None:
        return run.output
    replies = [turn.reply for turn in _kept(run) if turn.reply is not None]
    return text_of(replies[-1].get("content")) if replies else None


def _kept(run: Trajectory) -> list[Turn]:
    return [turn for turn in run.turns if turn.excluded_because is None]


def _messages(run: Trajectory, turns: list[Turn]) -> Iterator[Message]:
    """Messages between the replies, and tool results in the output after the last reply."""
    for turn in turns:
        yield from turn.messages
    for one in reversed(_state_messages(run) or ()):
        message: Message = one if isinstance(one, dict) else {}
        if message.get("role") != "tool":
            return
        yield message


def _state_messages(run: Trajectory) -> Sequence[Any] | None:
    """The messages of the run's output, which need not be chat messages; None: it has no list."""
    output = run.output
    messages = output.get("messages") if isinstance(output, Mapping) else None
    return messages if isinstance(messages, list | tuple) else None


def _is_object(arguments: Any) -> bool:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return False
    return isinstance(arguments, dict)
