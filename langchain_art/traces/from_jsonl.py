"""Traces of a JSONL file: conversations, or what Langfuse or LangSmith exported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_art.client.conversations import read_jsonl
from langchain_art.errors import ConfigError
from langchain_art.export.ids import HUMAN_REWARD
from langchain_art.export.langfuse_api import latest, observation_of
from langchain_art.export.stored_messages import prompt_of
from langchain_art.traces.from_langfuse import traces_of
from langchain_art.traces.from_langsmith import traces_of_runs
from langchain_art.traces.stored import Read, StoredTrace, Unreadable, scenario_of, score_of
from langchain_art.traces.training_traces import stored_trace
from langchain_art.wire import Turn

if TYPE_CHECKING:
    from langchain_art.export.langfuse_api import ObservationV2


def read_file(path: Path, name: str = HUMAN_REWARD) -> Read:
    """The traces of a JSONL file, whose lines are all of one of these shapes.

    ==================  ==========================================================================
    a line with         is
    ==================  ==========================================================================
    ``messages``        a conversation in OpenAI's format; ``tools``, ``score``, ``scenario``,
                        ``call_id`` and ``id`` may be there. Its last message is the reply
    ``run_type``        a run of LangSmith (`traces_of_runs`), scored by the feedback `name`
    ``traceId``         an observation of Langfuse, as its API and its exports write them
    ``schema_version``  a training trace of OpenEnv (`stored_trace`)
    ==================  ==========================================================================

    Raises ConfigError if the file cannot be read, or a line has none of these shapes.
    """
    lines: list[Mapping[str, Any]] = []
    for number, line in enumerate(read_jsonl(path), 1):
        if not isinstance(line, Mapping) or _SHAPES.isdisjoint(line):
            raise ConfigError(
                f"{path}, value {number} is {line!r:.200}, expected an object with `messages` (a "
                "conversation), `run_type` (LangSmith), `traceId` (Langfuse) or `schema_version` "
                "(a training trace of OpenEnv)"
            )
        lines.append(line)
    shapes = {shape for line in lines for shape in _SHAPES if shape in line}
    if not lines or len(shapes) > 1:
        raise ConfigError(f"{path} has lines with {sorted(shapes)}, expected one of them in all")
    if shapes == {"run_type"}:
        return traces_of_runs(lines, name)
    if shapes == {"traceId"}:
        return _of_observations(lines)
    found = Read()
    for line in lines:
        found.add(stored_trace if shapes == {"schema_version"} else _conversation, line)
    return found


_SHAPES = {"messages", "run_type", "traceId", "schema_version"}


def _of_observations(lines: list[Mapping[str, Any]]) -> Read:
    by_trace: dict[str, list[ObservationV2]] = {}
    for line in lines:
        one = observation_of(line)
        by_trace.setdefault(str(one.trace_id), []).append(one)
    return traces_of({trace: latest(parts) for trace, parts in by_trace.items()})


def _conversation(line: Mapping[str, Any]) -> StoredTrace:
    messages, tools = prompt_of(dict(line))
    *prompt, reply = messages
    if reply["role"] != "assistant" or not prompt:
        raise Unreadable("unknown_shape")
    call = Turn(
        messages=tuple(prompt),
        reply=reply,
        tools=tuple(tools),
        call_id=line.get("call_id"),
        ours=False,
    )
    written = json.dumps(messages, sort_keys=True, ensure_ascii=False)
    first = next((one for one in prompt if one["role"] == "user"), prompt[-1])
    return StoredTrace(
        id=str(line.get("id") or hashlib.sha256(written.encode()).hexdigest()[:32]),
        input=line.get("input", first.get("content")),
        output=reply.get("content"),
        calls=[call],
        scenario=scenario_of(line.get("scenario")),
        score=score_of([line.get("score")]),
    )
