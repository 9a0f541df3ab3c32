"""The spans of exported runs as OpenTelemetry's SDK has them: one trace a run."""

from __future__ import annotations

from functools import partial
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from langchain_art._version import __version__
from langchain_art.export import ids
from langchain_art.export.attributes import RunAttributes, explained
from langchain_art.export.records import ExportedRun, SpanRecord
from langchain_art.wire import Trajectory
from langchain_art.wire.redaction import Redactor

_RESOURCE = Resource.create({"service.name": "langchain-art", "service.version": __version__})
_SCOPE = InstrumentationScope("langchain_art", __version__)
_ERROR, _UNSET = Status(StatusCode.ERROR), Status(StatusCode.UNSET)


def otel_spans(run: ExportedRun, redactor: Redactor, *, langfuse: bool) -> list[ReadableSpan]:
    """The root and all spans of one run.

    Langfuse is posted the scores; another backend has them as events ``gen_ai.evaluation.result``
    of the root.
    """
    trajectory = run.trajectory
    trace = int(ids.trace_id(trajectory.id), 16)
    attributes = RunAttributes(run, redactor, langfuse=langfuse)

    def context(span: str) -> SpanContext:
        return SpanContext(trace, int(span, 16), False, TraceFlags(TraceFlags.SAMPLED))

    root = context(ids.root_id(trajectory.id))
    failed = trajectory.status in ("failed", "truncated")
    own = [context(_id(trajectory, span)) for span in run.spans]
    made = partial(ReadableSpan, resource=_RESOURCE, instrumentation_scope=_SCOPE)
    whole = made(
        name=run.labels.name,
        context=root,
        attributes=attributes.root(),
        events=() if langfuse else _evaluations(run, redactor),
        status=_ERROR if failed else _UNSET,
        start_time=_nanoseconds(run.started_at),
        end_time=_nanoseconds(run.ended_at),
    )
    inner = (
        made(
            name=_name(span, trajectory),
            context=where,
            parent=root if span.parent is None else own[span.parent],
            attributes=attributes.span(span),
            kind=SpanKind.CLIENT if span.kind == "model" else SpanKind.INTERNAL,
            status=_ERROR if span.outcome == "error" else _UNSET,
            start_time=_nanoseconds(span.started_at),
            end_time=_nanoseconds(span.ended_at or run.ended_at),
        )
        for span, where in zip(run.spans, own, strict=True)
    )
    return [whole, *inner]


def _id(run: Trajectory, span: SpanRecord) -> str:
    if span.turn is None:
        return ids.span_id(run.id, span.number)
    return ids.turn_observation_id(run.id, run.turns[span.turn], span.turn)


def _name(span: SpanRecord, run: Trajectory) -> str:
    """A node's or a tool's own name; of a model call, that of its node."""
    if span.turn is None:
        return span.name
    turn = run.turns[span.turn]
    return turn.node or turn.model or span.name


def _evaluations(run: ExportedRun, redactor: Redactor) -> list[Event]:
    found: list[Event] = []
    for name, (value, why) in explained(run.trajectory, redactor).items():
        told: dict[str, Any] = {
            "gen_ai.evaluation.name": name,
            "gen_ai.evaluation.score.value": value,
        }
        if why is not None:
            told["gen_ai.evaluation.explanation"] = why
        found.append(Event("gen_ai.evaluation.result", told, _nanoseconds(run.ended_at)))
    return found


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
