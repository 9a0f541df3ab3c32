"""Traces of Langfuse: of its callback handler, of its SDK, and those that were exported here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from langchain_art.export.langfuse_api import connect, observations, roots, values
from langchain_art.export.names import CALL, DISCARDED, EXCLUDED, HUMAN_REWARD, SCENARIO, TRAJECTORY
from langchain_art.export.stored_messages import decoded, prompt_of, reply_of, text_in
from langchain_art.traces.stored import Read, StoredCall, StoredTrace, Unreadable, score_of

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
    """The newest traces of a project, with the scores that people gave them.

    Args:
        since: only traces that began then or later.
        environment: only of this one: ``production``.
        name: of the score; numbers and booleans count, of a trace or its root.
        limit: the most traces.

    Raises:
        ConfigError, ServerUnreachable: as `langfuse_api.connect` and ``in_words``.
    """
    api = connect()
    begun = [one.trace_id for one in roots(api, since, environment, limit) if one.trace_id]
    return read_traces(api, begun, values(api, name, since))


def read_traces(
    api: LangfuseAPI, wanted: Iterable[str], given: Mapping[str, list[float]] | None = None
) -> Read:
    """The traces of these ids; `given` are scores by the id of what they are about."""
    by_trace: dict[str, list[ObservationV2]] = {trace: [] for trace in wanted}
    for one in observations(api, by_trace, fields=_FIELDS, expand=_EXPANDED):
        if one.trace_id in by_trace:
            by_trace[one.trace_id].append(one)
    found = Read()
    for trace, parts in by_trace.items():
        try:
            found.traces.append(trace_of(trace, parts, given or {}))
        except Unreadable as reason:
            found.leave_out(str(reason))
    return found


def trace_of(
    trace: str, parts: Sequence[ObservationV2], values: Mapping[str, list[float]]
) -> StoredTrace:
    """One trace of its observations; `values` are scores by the id of what they are about.

    Raises Unreadable.
    """
    ordered = sorted(parts, key=lambda one: (one.start_time, _index(one)))
    root = next((one for one in ordered if one.is_root_observation), None)
    if root is None:
        raise Unreadable("no_root")
    calls = [_call(one) for one in ordered if one.type == "GENERATION" and not _unanswered(one)]
    if not calls:
        raise Unreadable("no_calls")
    known: dict[str, Any] = {}
    for one in ordered:
        known |= {key: value for key, value in (one.metadata or {}).items() if key in _OURS}
    given = [*values.get(trace, ()), *values.get(root.id, ())]
    return StoredTrace(
        id=trace,
        input=decoded(root.input),
        output=decoded(root.output),
        calls=calls,
        run=text_in(known.get(TRAJECTORY)),
        scenario=text_in(known.get(SCENARIO)),
        score=score_of(given),
        failed=str(root.level) == "ERROR",
    )


_OURS = (TRAJECTORY, SCENARIO)


def _index(one: ObservationV2) -> int:
    """A call's place among those of its run: times are in milliseconds, and may be equal."""
    index = decoded((one.metadata or {}).get("call_index"))
    return index if isinstance(index, int) else 0


def _unanswered(one: ObservationV2) -> bool:
    """True if a call failed, so that the graph had no reply of it."""
    return one.output is None and str(one.level) == "ERROR"


def _call(one: ObservationV2) -> StoredCall:
    metadata = one.metadata or {}
    try:
        messages, tools = prompt_of(one.input)
        reply = reply_of(one.output) if one.output is not None else None
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable("unknown_shape") from error
    if reply is None:
        raise Unreadable("unknown_shape")
    return StoredCall(
        messages=messages,
        tools=tools,
        reply=reply,
        call_id=text_in(metadata.get(CALL)),
        model=one.model,
        node=text_in(metadata.get("langgraph_node")) or one.name,
        excluded_because=why if (why := text_in(metadata.get(EXCLUDED))) in DISCARDED else None,
    )
