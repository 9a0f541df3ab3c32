"""Runs of a project of Langfuse, as far as an analysis reads them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from langchain_art.evaluators.transcript import text_of
from langchain_art.export.langfuse_api import connect, observations, roots, values
from langchain_art.export.names import CALL, DISCARDED, EXCLUDED, REWARD, SCENARIO, TRAJECTORY
from langchain_art.export.stored_messages import prompt_of, reply_of, text_in
from langchain_art.wire import Trajectory, Turn, Usage

if TYPE_CHECKING:
    from langchain_art.export.langfuse_api import ObservationV2

_FIELDS = "core,basic,io,metadata,model,usage"
#: Keys of metadata that are ids, and may be longer than the API shows unasked.
_EXPANDED = ",".join((TRAJECTORY, CALL, SCENARIO))


@dataclass(frozen=True)
class LangfuseRuns:
    """Runs that were read, and counts of those that were not."""

    runs: list[Trajectory]
    notes: list[str] = field(default_factory=list[str])


def langfuse_runs(
    *,
    score: str = REWARD,
    environment: str | None = None,
    limit: int = 1000,
) -> LangfuseRuns:
    """The newest traces of a project as runs; what has no root is left out and counted.

    A generation is a call, with its node's name, model, tokens and seconds. A model that is named
    ``policy@version`` is taken for ours, any other for a hosted one.

    Args:
        score: the name of the score that is a run's reward: numbers and booleans, of a trace or of
            its root; the mean of several.
        environment: only traces of this one: ``production``.
        limit: the most traces.

    Raises:
        ConfigError: no keys, or keys that Langfuse refuses.
        ServerUnreachable: Langfuse gives no answer.
    """
    api = connect()
    begun = [one.trace_id for one in roots(api, None, environment, limit) if one.trace_id]
    parts = defaultdict[str, list["ObservationV2"]](list)
    for one in observations(api, begun, fields=_FIELDS, expand=_EXPANDED):
        parts[str(one.trace_id)].append(one)
    rewards = values(api, score)
    found, left_out = list[Trajectory](), Counter[str]()
    for trace in begun:
        ordered = sorted(parts[trace], key=lambda one: one.start_time)
        root = next((one for one in ordered if one.is_root_observation), None)
        if root is None:
            left_out["have no root yet"] += 1
            continue
        given = [*rewards.get(trace, ()), *rewards.get(root.id, ())]
        found.append(_run(trace, root, ordered, fmean(given) if given else None, left_out))
    return LangfuseRuns(
        found, [f"Of Langfuse's traces and calls, {n} {why}." for why, n in left_out.items()]
    )


def _run(
    trace: str,
    root: ObservationV2,
    ordered: Sequence[ObservationV2],
    reward: float | None,
    left_out: Counter[str],
) -> Trajectory:
    known: dict[str, Any] = {}
    for one in ordered:
        known |= {key: value for key, value in (one.metadata or {}).items() if value is not None}
    failed = _failed(root)
    return Trajectory(
        id=text_in(known.get(TRAJECTORY)) or trace,
        scenario=text_in(known.get(SCENARIO)),
        reward=reward,
        status="failed" if failed else "completed",
        error=(root.status_message or "failed") if failed else None,
        turns=tuple(_turn(one, left_out) for one in ordered if one.type == "GENERATION"),
    )


def _turn(one: ObservationV2, left_out: Counter[str]) -> Turn:
    metadata: Mapping[str, Any] = one.metadata or {}
    messages, reply = (), None
    try:
        messages = tuple(prompt_of(one.input)[0]) if one.input is not None else ()
        reply = reply_of(one.output) if one.output is not None else None
    except (ValueError, KeyError, TypeError):
        left_out["have messages that are no chat; their actions are not counted"] += 1
    usage = None
    with suppress(KeyError, TypeError):  # not known
        used: Mapping[str, Any] = one.usage_details or {}
        usage = Usage(prompt_tokens=used["input"], completion_tokens=used["output"])
    why = text_in(metadata.get(EXCLUDED))
    seconds = (one.end_time - one.start_time).total_seconds() if one.end_time else None
    return Turn(
        call_id=text_in(metadata.get(CALL)),
        node=text_in(metadata.get("langgraph_node")) or one.name,
        model=one.model,
        messages=messages,
        reply=reply,
        usage=usage,
        started_at=one.start_time.timestamp(),
        latency=None if seconds is None else max(0.0, seconds),
        ours="@" in (one.model or ""),
        excluded_because=why if why in DISCARDED else None,
        error=(one.status_message or text_of(one.output)) if _failed(one) else None,
    )


def _failed(one: ObservationV2) -> bool:
    return one.level is not None and str(one.level.value) == "ERROR"
