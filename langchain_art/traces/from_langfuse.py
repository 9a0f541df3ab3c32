"""Traces of Langfuse: of its callback handler, of its SDK, and those that were exported here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from langchain_art.evaluators.transcript import text_of
from langchain_art.export.ids import CALL, DISCARDED, EXCLUDED, HUMAN_REWARD, SCENARIO, TRAJECTORY
from langchain_art.export.langfuse_api import connect, observations, roots, values
from langchain_art.export.stored_messages import decoded, prompt_of, reply_of, text_in
from langchain_art.traces.stored import Read, StoredTrace, Unreadable, score_of
from langchain_art.wire import Turn, Usage

if TYPE_CHECKING:
    from langchain_art.export.langfuse_api import LangfuseAPI, ObservationV2

_FIELDS = "core,basic,io,metadata,model"
#: Keys of metadata that are ids, and may be longer than the API shows unasked.
_EXPANDED = ",".join((TRAJECTORY, CALL, SCENARIO))


def read_langfuse(
    since: datetime | None = None,
    *,
    environment: str | None = None,
    name: str = HUMAN_REWARD,
    limit: int = 1000,
) -> Read:
    """The newest traces of a project, with the scores `name` that people gave them.

    Numbers and booleans count, of a trace or its root. Raises as `langfuse_api.connect` and
    ``in_words``.
    """
    api = connect()
    begun = [one.trace_id for one in roots(api, since, environment, limit) if one.trace_id]
    return read_traces(api, begun, values(api, name, since))


def read_traces(
    api: LangfuseAPI,
    wanted: Iterable[str],
    given: Mapping[str, list[float]] | None = None,
) -> Read:
    """The traces of these ids; `given` are scores by the id of what they are about."""
    by_trace: dict[str, list[ObservationV2]] = {trace: [] for trace in wanted}
    for one in observations(api, by_trace, fields=_FIELDS, expand=_EXPANDED):
        if one.trace_id in by_trace:
            by_trace[one.trace_id].append(one)
    return traces_of(by_trace, given)


def traces_of(
    by_trace: Mapping[str, Sequence[ObservationV2]],
    given: Mapping[str, list[float]] | None = None,
) -> Read:
    """The traces of these observations; see `read_traces`."""
    found = Read()
    for trace, parts in by_trace.items():
        found.add(_trace, trace, parts, given or {})
    return found


def _trace(
    trace: str, parts: Sequence[ObservationV2], values: Mapping[str, list[float]]
) -> StoredTrace:
    ordered = sorted(parts, key=lambda one: (one.start_time, _index(one)))
    root = next((one for one in ordered if one.is_root_observation), None)
    if root is None:
        raise Unreadable("no_root")
    generations = [one for one in ordered if one.type == "GENERATION"]
    calls = list(filter(None, map(_call, generations)))
    if not calls:
        raise Unreadable("no_calls")
    known: dict[str, Any] = {}
    for one in ordered:
        known |= {key: value for key, value in (one.metadata or {}).items() if key in _OURS}
    return StoredTrace(
        id=trace,
        input=decoded(root.input),
        output=decoded(root.output),
        calls=calls,
        run=text_in(known.get(TRAJECTORY)),
        scenario=text_in(known.get(SCENARIO)),
        score=score_of([*values.get(trace, ()), *values.get(root.id, ())]),
        failed=root.level == "ERROR",
    )


_OURS = (TRAJECTORY, SCENARIO)


def _index(one: ObservationV2) -> int:
    """A call's place among those of its run: times are in milliseconds, and may be equal."""
    index = decoded((one.metadata or {}).get("call_index"))
    return index if isinstance(index, int) else 0


def _call(one: ObservationV2) -> Turn | None:
    """A call; None: it failed, so that the graph had no reply of it."""
    metadata, failed = one.metadata or {}, one.level == "ERROR"
    if one.output is None and failed:
        return None
    messages, tools = prompt_of(one.input)
    reply = None if one.output is None else reply_of(one.output)
    if not reply:
        raise Unreadable("unknown_shape")
    usage = None
    with suppress(KeyError, TypeError):  # not known
        used: Mapping[str, Any] = one.usage_details or {}
        usage = Usage(prompt_tokens=used["input"], completion_tokens=used["output"])
    seconds = (one.end_time - one.start_time).total_seconds() if one.end_time else None
    return Turn(
        messages=tuple(messages),
        tools=tuple(tools),
        reply=reply,
        ours=False,
        call_id=text_in(metadata.get(CALL)),
        model=one.model,
        node=text_in(metadata.get("langgraph_node")) or one.name,
        excluded_because=why if (why := text_in(metadata.get(EXCLUDED))) in DISCARDED else None,
        usage=usage,
        started_at=one.start_time.timestamp(),
        latency=None if seconds is None else max(0.0, seconds),
        error=(one.status_message or text_of(one.output)) if failed else None,
    )
