"""Runs of a project of Langfuse, as far as an analysis reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

from langchain_art.export.ids import REWARD
from langchain_art.export.langfuse_api import connect, roots, values
from langchain_art.traces.from_langfuse import read_traces
from langchain_art.traces.stored import REASONS, StoredTrace
from langchain_art.wire import Trajectory


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
    read = read_traces(api, begun, values(api, score), all_calls=True)
    notes = [f"{n} traces of Langfuse {REASONS[why]}." for why, n in read.unreadable.items()]
    if unread := sum(trace.unread for trace in read.traces):
        notes.append(f"{unread} calls are no chat; their actions are not counted.")
    return LangfuseRuns([_run(trace) for trace in read.traces], notes)


def _run(trace: StoredTrace) -> Trajectory:
    return Trajectory(
        id=trace.run or trace.id,
        scenario=trace.scenario,
        reward=trace.score,
        status="failed" if trace.failed else "completed",
        error=trace.error,
        turns=tuple(
            call.model_copy(update={"ours": "@" in (call.model or "")}) for call in trace.calls
        ),
    )
