"""OpenTelemetry spans as they come in, and the observations that Langfuse makes of them."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

#: A value of metadata that is longer comes back cut, unless it is asked for by its key.
METADATA_CUT = 200
_OBSERVATION, _TRACE = "langfuse.observation.", "langfuse.trace."


@dataclass
class Span:
    """One span as it was received. `received` is in seconds since the epoch."""

    trace_id: str
    id: str
    parent: str
    name: str
    start: int
    end: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    scope: str
    status: int
    received: float = field(default=0.0)

    @property
    def type(self) -> str:
        """``generation``, ``agent``, ``tool`` …"""
        return self.attributes.get(f"{_OBSERVATION}type", "span")

    def told(self, key: str, default: Any = None) -> Any:
        """The attribute ``langfuse.observation.KEY``, decoded if it is JSON."""
        return _decoded(self.attributes.get(_OBSERVATION + key, default))

    @property
    def metadata(self) -> dict[str, Any]:
        """The span's own metadata and its trace's, decoded."""
        return {
            name.removeprefix(prefix): _decoded(value)
            for prefix in (f"{_TRACE}metadata.", f"{_OBSERVATION}metadata.")
            for name, value in self.attributes.items()
            if name.startswith(prefix)
        }

    def observation(self, groups: set[str], expanded: set[str], project: str) -> dict[str, Any]:
        """The observation as the API gives it, with the asked groups of fields."""
        had = self.attributes.get
        one: dict[str, Any] = {
            "id": self.id,
            "traceId": self.trace_id,
            "startTime": iso(self.start / 1e9),
            "endTime": iso(self.end / 1e9),
            "projectId": project,
            "parentObservationId": self.parent or None,
            "type": self.type.upper(),
        }
        if "basic" in groups:
            one |= {
                "name": self.name,
                "level": had(f"{_OBSERVATION}level", "DEFAULT"),
                "statusMessage": had(f"{_OBSERVATION}status_message"),
                "version": had("langfuse.version"),
                "environment": self.environment,
                "bookmarked": False,
                "public": False,
                "userId": had("user.id"),
                "sessionId": had("session.id"),
                "isRootObservation": self.is_root,
            }
        if "time" in groups:
            one["completionStartTime"] = self.told("completion_start_time")
            one["createdAt"] = one["updatedAt"] = iso(self.received)
        if "io" in groups:
            for side in ("input", "output"):
                one[side] = had(_OBSERVATION + side)  # strings, as they were sent
        if "metadata" in groups:
            one["metadata"] = {
                key: value if key in expanded else _cut(value)
                for key, value in self.metadata.items()
            }
        if "model" in groups:
            one |= {"model": had(f"{_OBSERVATION}model.name"), "internalModelId": None}
            one["modelParameters"] = self.told("model.parameters")
        return one

    @property
    def environment(self) -> str:
        """``default`` where none was told."""
        found = self.attributes.get("langfuse.environment")
        return found or self.resource.get("langfuse.environment") or "default"

    @property
    def is_root(self) -> bool:
        """Without a parent, or marked as the application's root by the SDK."""
        return not self.parent or bool(self.attributes.get("langfuse.internal.is_app_root"))


def spans_of(body: bytes, received: float) -> list[Span]:
    """The spans of a request's body (protobuf)."""
    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    return [
        Span(
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.name,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _attributes(span.attributes),
            _attributes(of_resource.resource.attributes),
            of_scope.scope.name,
            span.status.code,
            received,
        )
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def iso(seconds: float) -> str:
    """Seconds since the epoch as the API writes them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return getattr(value, kind) if kind else None


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _cut(value: Any) -> Any:
    written = value if isinstance(value, str) else json.dumps(value)
    return value if len(written) <= METADATA_CUT else written[:METADATA_CUT]
