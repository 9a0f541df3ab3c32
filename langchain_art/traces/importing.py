"""`langchain-art traces import`: stored traces, each put to the best use that it still has."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_art.client.sync_client import ArtClient
from langchain_art.export.brief import was_cut
from langchain_art.export.ids import HUMAN_REWARD
from langchain_art.traces.stored import REASONS as UNREADABLE
from langchain_art.traces.stored import (
    Provenance,
    Read,
    Recorder,
    StoredTrace,
    is_redacted,
    keep_run,
    safe_id,
)
from langchain_art.tracing.message_log import jsonable
from langchain_art.wire import Message, Review, Trajectory, TrajectoryGroup, Turn
from langchain_art.wire.identifiers import scenario_id

#: The files that an import writes, and what reads them.
RUNS, SCENARIOS = "runs.jsonl", "scenarios.jsonl"
CONVERSATIONS, CALIBRATION = "conversations.jsonl", "calibration.jsonl"
FILES = {
    RUNS: "runs of this server to imitate, on their recorded tokens (warm start)",
    SCENARIOS: "scenarios for new rollouts (eval, fit)",
    CONVERSATIONS: "conversations for supervised steps (warm start)",
    CALIBRATION: "groups that people scored, to calibrate a judge (calibrate)",
}
#: Why a trace is not in a file that it could have been in.
REASONS = {
    **UNREADABLE,
    "no_input": "have no input that a scenario could be made of",
    "cut": "have an input that was shortened when it was exported",
    "redacted": "have texts from which a secret was taken when they were exported",
    "same_scenario": "have the input of another trace",
    "same_run": "are of the run of another trace",
    "failed": "failed, so they are no demonstration",
    "not_scored": "were not scored",
    "scored_low": "were scored lower than --good",
}


@dataclass(frozen=True)
class Imported:
    """Outcome of the traces: ``exact + stale + foreign + unreadable`` is all that were read."""

    exact: int
    """Traces answered by this server's policies, by versions that are fresh enough."""
    stale: int
    """Traces answered by this server's policies, by versions that are too old, or whose policy is
    gone."""
    foreign: int
    """Traces answered by other models."""
    unreadable: int
    written: dict[str, int]
    """Lines by file (`FILES`)."""
    left_out: dict[str, dict[str, int]]
    """Traces that are not in a file, by file and reason (`REASONS`)."""


def import_traces(
    client: ArtClient,
    read: Read,
    folder: Path,
    *,
    store: str,
    good: float = 1.0,
    max_staleness: int = 8,
) -> Imported:
    """Sort traces by what can be learned from them, and write what other commands read.

    ==================  ======================================================================
    a trace             becomes
    ==================  ======================================================================
    exact               a run of the server with its recorded tokens, and a review if it has a
                        score (but from Langfuse: `review pull` reads those); in `RUNS` if it
                        was scored well
    stale               a scenario; a conversation if it was scored well
    foreign             the same; with a score, a run to calibrate a judge with
    ==================  ======================================================================

    The same traces again give the same files and change nothing on the server.

    Args:
        client: of the server that may have recorded the calls.
        read: the traces.
        folder: receives the files; those of an earlier import there are replaced.
        store: where they come from: ``langfuse``, ``langsmith``, ``file``.
        good: the lowest score of a demonstration.
        max_staleness: the most versions that a fresh call is behind
            (`TrainConfig.max_staleness`).
    """
    recorder, lines = Recorder(client), {name: list[Any]() for name in FILES}
    left_out = {name: Counter[str]() for name in FILES}
    counts: Counter[str] = Counter()
    seen = {name: set[object]() for name in FILES}
    for trace in read.traces:
        about = recorder.look_up(trace)
        fresh = about.staleness is not None and about.staleness <= max_staleness
        kind = "foreign" if not about.known else "exact" if fresh else "stale"
        counts[kind] += 1
        if kind == "exact":
            run = _keep(client, trace, about, store)
            why = _why_not_imitated(trace, good)
            _add(lines[RUNS], left_out[RUNS], why or _once(run, run, seen[RUNS]))
            continue
        found = _scenario(trace, about, seen[SCENARIOS], good)
        _add(lines[SCENARIOS], left_out[SCENARIOS], found)
        found = _demonstration(trace, about, seen[CONVERSATIONS], good)
        _add(lines[CONVERSATIONS], left_out[CONVERSATIONS], found)
        if kind == "foreign":
            _add(lines[CALIBRATION], left_out[CALIBRATION], _rated(trace, seen[CALIBRATION]))
    lines[CALIBRATION] = _groups(lines[CALIBRATION])
    for name in FILES:
        left_out[name].update(read.unreadable)
        _write(folder / name, lines[name])
    return Imported(
        exact=counts["exact"],
        stale=counts["stale"],
        foreign=counts["foreign"],
        unreadable=sum(read.unreadable.values()),
        written={name: len(some) for name, some in lines.items()},
        left_out={name: dict(some.most_common()) for name, some in left_out.items()},
    )


def _keep(client: ArtClient, trace: StoredTrace, about: Provenance, store: str) -> str:
    run = keep_run(client, trace, about, store)
    if trace.score is not None and store != "langfuse":
        # A mean has no time of its own: of two imports, the later one holds.
        said = Review(
            id=safe_id(trace.id),
            source=store,
            trajectory=run,
            kind="reward",
            name=HUMAN_REWARD,
            value=trace.score,
            at=0.0,
        )
        client.put_reviews([said])
    return run


def _scenario(
    trace: StoredTrace, about: Provenance, seen: set[object], good: float
) -> list[Any] | str:
    given = trace.input
    if about.stored is not None and about.stored.input is not None:
        given = about.stored.input  # whole; an exported one may be cut, and is redacted
    elif given is None:
        return "no_input"
    elif was_cut(given):
        return "cut"
    elif is_redacted(given):
        return "redacted"
    content = {"input": jsonable(given)}
    name = trace.scenario or scenario_id(content)
    if name in seen:
        return "same_scenario"
    seen.add(name)
    well = _why_not_imitated(trace, good) is None
    shown = well and not was_cut(trace.output) and not is_redacted(trace.output)
    reference = {"reference": jsonable(trace.output)} if shown else {}
    return [{"id": name, **content, **reference}]


def _why_not_imitated(trace: StoredTrace, good: float) -> str | None:
    if trace.failed:
        return "failed"
    if trace.score is None:
        return "not_scored"
    return "scored_low" if trace.score < good else None


def _demonstration(
    trace: StoredTrace, about: Provenance, seen: set[object], good: float
) -> list[Any] | str:
    if why := _why_not_imitated(trace, good):
        return why
    # A run that the server has is learned on its recorded tokens.
    if about.stored is not None:
        return _once(about.run, about.run, seen)
    found = list(conversations(trace))
    return "redacted" if is_redacted(found) else found


def _rated(trace: StoredTrace, seen: set[object]) -> list[Any] | str:
    if trace.score is None:
        return "not_scored"
    run = Trajectory(
        id=safe_id(trace.id),
        scenario=trace.scenario or scenario_id({"input": jsonable(trace.input)}),
        turns=tuple(trace.calls),
        input=jsonable(trace.input),
        output=jsonable(trace.output),
        scores={"human": trace.score},
    )
    return _once(run, (run.scenario, run.id), seen)


def _once(line: Any, key: object, seen: set[object]) -> list[Any] | str:
    """The line, if its key was not seen: readers of the files refuse a run that is there twice."""
    if key in seen:
        return "same_run"
    seen.add(key)
    return [line]


def _groups(runs: Iterable[Trajectory]) -> list[Any]:
    """Runs as groups of one scenario each, which `calibrate` takes."""
    found: dict[str, list[Trajectory]] = {}
    for run in runs:
        found.setdefault(run.scenario or run.id, []).append(run)
    return [
        TrajectoryGroup(id=safe_id(name), trajectories=tuple(some)).model_dump(mode="json")
        for name, some in found.items()
    ]


def _add(lines: list[Any], left_out: Counter[str], found: list[Any] | str) -> None:
    if isinstance(found, str):
        left_out[found] += 1
    else:
        lines += found


def _write(path: Path, lines: Sequence[Any]) -> None:
    """The lines as JSONL; without any, no file (and none of an earlier import)."""
    if not lines:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


def conversations(trace: StoredTrace) -> list[dict[str, Any]]:
    """A trace's calls as conversations in OpenAI's format, as `read_conversations` takes them.

    A call whose prompt and reply are the beginning of a later call's prompt is part of that one.
    In the longer one its reply is learned, too; other replies in a prompt (of earlier sessions, of
    a summary, of attempts that the graph discarded) are context: their ``weight`` is 0.
    """
    calls = [call for call in trace.calls if call.excluded_because is None]
    whole = [[*call.messages, call.reply or {}] for call in calls]
    return [
        _written(call, shown, whole)
        for index, (call, shown) in enumerate(zip(calls, whole, strict=True))
        if not any(
            other.tools == call.tools and list(other.messages[: len(shown)]) == shown
            for other in calls[index + 1 :]
        )
    ]


def _written(call: Turn, shown: list[Message], whole: list[list[Message]]) -> dict[str, Any]:
    messages: list[Message] = []
    for index, message in enumerate(shown):
        sampled = shown[: index + 1] in whole
        context = message["role"] == "assistant" and not sampled
        messages.append({**message, "weight": 0} if context else message)
    return {"messages": messages, **({"tools": list(call.tools)} if call.tools else {})}
