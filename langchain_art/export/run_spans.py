"""The spans of a run as one list: of what was recorded, or of the turns alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from uuid import UUID

from langgraph.constants import START

from langchain_art.call_tags import node_names
from langchain_art.export.attributes import PARAMETERS
from langchain_art.export.brief import brief, tool_result
from langchain_art.export.records import Kind, SpanRecord
from langchain_art.tracing.run import Run
from langchain_art.tracing.spans import Span
from langchain_art.wire import Turn


def recorded_spans(run: Run) -> tuple[SpanRecord, ...]:
    """The graphs, nodes, tools and model calls of a run that was captured here.

    Left out are the chains that a node consists of (prompts, parsers, routing functions): what is
    in them stands in the span around them. So is a run's only graph, which is the run.
    """
    spans, calls = run.recorder.span_list()
    by_id = {span.run_id: span for span in spans}
    turns: dict[UUID, list[int]] = {}
    for index, call in enumerate(calls):
        turns.setdefault(call.span.run_id, []).append(index)
    graphs = sum(span.kind == "chain" and span.root == span.run_id for span in spans)
    numbers: dict[UUID, int] = {}
    found: list[SpanRecord] = []
    for span in spans:
        kind = _kind(span, graphs)
        if kind is None or (kind == "model" and span.run_id not in turns):
            continue
        numbers[span.run_id] = len(found)
        path = tuple(node_names(span.namespace))
        clock = run.recorder.wall_clock
        ended, first = span.ended_at, span.first_token_at
        shown = SpanRecord(
            number=len(found),
            parent=_parent(span, by_id, numbers),
            kind=kind,
            name=span.name or (path[-1] if path else kind),
            started_at=clock(span.begun_at),
            ended_at=None if ended is None else clock(ended),
            first_token_at=None if first is None else clock(first),
            path=path,
            namespace=span.namespace,
            attempt=span.attempt_number,
            outcome=span.outcome,
            error=span.error,
            input=brief(span.input) if kind == "tool" else None,
            output=brief(tool_result(span.output)),
        )
        if kind != "model":
            found.append(shown)
            continue
        # The choices of one request (n > 1) are a turn each.
        for turn in turns.get(span.run_id, ()):
            given = calls[turn].params
            known = {name: given[name] for name in PARAMETERS if given.get(name) is not None}
            of_call = {"turn": turn, "number": len(found), "parameters": known}
            found.append(shown.model_copy(update=of_call))
    return tuple(found)


def _kind(span: Span, graphs: int) -> Kind | None:
    if span.kind != "chain":
        return span.kind
    if span.root == span.run_id:
        return "graph" if graphs > 1 else None
    if span.attempt != span.run_id or span.name == START:  # where it only chooses the first node
        return None
    return "node" if span.namespace else "graph"


def _parent(span: Span, by_id: dict[UUID, Span], numbers: dict[UUID, int]) -> int | None:
    above = span.parent
    while above is not None and above in by_id:
        if above in numbers:
            return numbers[above]
        above = by_id[above].parent
    return None


def spans_of_turns(turns: Sequence[Turn]) -> tuple[SpanRecord, ...]:
    """The nodes and model calls of a run of which only the turns are known.

    A run of the gateway or of another process, or one that an earlier process captured. A node
    lasts from its first call to its last; what it did besides is not known, nor are its tools.
    """
    numbers, found = count(), list[SpanRecord]()
    nodes: dict[tuple[str, int], int] = {}
    for index, turn in enumerate(turns):
        started = turn.started_at or 0.0
        ended = started + (turn.latency or 0.0)
        parent: int | None = None
        parts = (turn.namespace or "").split("|") if turn.namespace else []
        for depth in range(1, len(parts) + 1):
            if parts[depth - 1].isdigit():
                continue
            namespace = "|".join(parts[:depth])
            attempt = turn.attempt if depth == len(parts) else 1
            known = nodes.get((namespace, attempt))
            if known is None:
                names = tuple(node_names(namespace))
                known = nodes[namespace, attempt] = next(numbers)
                found.append(
                    SpanRecord(
                        number=known,
                        parent=parent,
                        kind="node",
                        name=names[-1],
                        started_at=started,
                        path=names,
                        namespace=namespace,
                        attempt=attempt,
                    )
                )
            last = max(found[known].ended_at or ended, ended)
            found[known] = found[known].model_copy(update={"ended_at": last})
            parent = known
        found.append(
            SpanRecord(
                number=next(numbers),
                parent=parent,
                kind="model",
                name="model",
                started_at=started,
                ended_at=ended,
                turn=index,
                path=tuple(turn.path),
                namespace=turn.namespace or "",
                attempt=turn.attempt,
                outcome="error" if turn.error else "ok",
                error=turn.error,
            )
        )
    return tuple(found)
