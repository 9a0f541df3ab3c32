"""Error messages grouped by what they say, without what differs from run to run."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal

from langchain_art.analytics.figures import ErrorPattern
from langchain_art.evaluators.transcript import text_of
from langchain_art.wire import Message, Trajectory
from langchain_art.wire.redaction import redact

_LENGTH = 160
#: How LangGraph's ToolNode begins the result of a tool that raised.
_TOOL_ERROR = re.compile(r"Error\b")
#: What differs between messages of one kind, and what stands in its place; the order matters.
_VARYING = (
    (re.compile(r"\b[a-z][\w+.-]*://\S+"), "<url>"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"(['\"`])(?:(?!\1).){1,200}\1"), "<text>"),
    (re.compile(r"(?<![\w<])(?:[A-Za-z]:)?[\\/](?:[\w.-]+[\\/])+[\w.-]*"), "<path>"),
    (re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b(?:call|chatcmpl|run|req)[-_][\w-]{6,}"), "<id>"),
    (re.compile(r"(?<![\w<])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE), "<n>"),
)


def normalised(message: str) -> str:
    """A message in one line, without ids, numbers, quotations, paths, addresses and secrets.

    Example: ``Timeout after 31 s at 'mail-7'`` becomes ``Timeout after <n> s at <text>``.
    """
    text = " ".join(redact(message).split())
    for varying, instead in _VARYING:
        text = varying.sub(instead, text)
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"


def error_patterns(runs: Iterable[Trajectory]) -> tuple[ErrorPattern, ...]:
    """Errors of runs, calls and tools, grouped; the most frequent first."""
    counted = Counter[tuple[Literal["run", "call", "tool"], str, str]]()
    seen_in = defaultdict[tuple[str, str, str], dict[str, None]](dict)
    for run in runs:
        for where, name, message in _errors(run):
            key = (where, name, normalised(message))
            counted[key] += 1
            seen_in[key][run.id] = None
    return tuple(
        ErrorPattern(
            where=where,
            name=name,
            pattern=pattern,
            count=count,
            runs=len(seen_in[where, name, pattern]),
            example=next(iter(seen_in[where, name, pattern])),
        )
        for (where, name, pattern), count in counted.most_common()
    )


def _errors(run: Trajectory) -> Iterator[tuple[Literal["run", "call", "tool"], str, str]]:
    if run.error:
        yield "run", "-", run.error
    tools: dict[str, str] = {}
    answered: set[str] = set()
    for turn in run.turns:
        if turn.error:
            yield "call", turn.label, turn.error
        for message in turn.messages:  # a prompt that is no continuation repeats earlier results
            tools |= _called(message)
            called = str(message.get("tool_call_id") or "")
            text = text_of(message.get("content"))
            if message.get("role") == "tool" and _TOOL_ERROR.match(text) and called not in answered:
                yield "tool", str(message.get("name") or tools.get(called, "-")), text
            if called:
                answered.add(called)
        tools |= _called(turn.reply or {})


def _called(message: Message) -> dict[str, str]:
    """The tools that a message calls, by the ids of the calls."""
    return {
        str(call.get("id")): str((call.get("function") or {}).get("name"))
        for call in message.get("tool_calls") or ()
    }
