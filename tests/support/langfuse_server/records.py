"""Spans and scores as they come in, and as the API gives them."""

import json
import re
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from langfuse.api import CreateScoreRequest
from langfuse.api.core.pydantic_utilities import parse_obj_as
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pydantic import ValidationError

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


_ENVIRONMENT = re.compile(r"(?!langfuse)[a-z0-9_-]{1,40}")
_TYPES = ("NUMERIC", "BOOLEAN", "CATEGORICAL", "TEXT", "CORRECTION")


class Refused(Exception):
    """What the server says of a request, or of one score in a list."""


@dataclass
class Score:
    """One score. `timestamp`, `created` and `updated` are seconds since the epoch."""

    id: str
    name: str
    value: Any
    data_type: str
    subject: dict[str, str]
    source: str = "API"
    comment: str | None = None
    config_id: str | None = None
    queue_id: str | None = None
    author: str | None = None
    environment: str = "default"
    metadata: dict[str, Any] | None = None
    timestamp: float = 0.0
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)

    def public(self, groups: set[str], project: str) -> dict[str, Any]:
        """The score as the API gives it, with the asked groups of fields."""
        one: dict[str, Any] = {
            "id": self.id,
            "projectId": project,
            "name": self.name,
            "value": self.value,
            "dataType": self.data_type,
            "source": self.source,
            "timestamp": iso(self.timestamp),
            "environment": self.environment,
            "createdAt": iso(self.created),
            "updatedAt": iso(self.updated),
        }
        if "details" in groups:
            details = {"comment": self.comment, "configId": self.config_id}
            one |= details | {"metadata": self.metadata or {}}
        if "subject" in groups:
            one["subject"] = self.subject
        if "annotation" in groups:
            one |= {"authorUserId": self.author, "queueId": self.queue_id}
        return one


def score_of(sent: Any) -> Score:
    """The score of one entry of ``POST /api/public/scores``. Raises Refused."""
    try:
        asked: CreateScoreRequest = parse_obj_as(CreateScoreRequest, sent)
    except ValidationError as error:
        raise Refused(f"Invalid request data: {error}") from error
    if unknown := set(asked.model_extra or ()):
        raise Refused(f"Unrecognized keys: {sorted(unknown)}")
    if not _ENVIRONMENT.fullmatch(asked.environment or "default"):
        raise Refused(f"Invalid environment {asked.environment!r}")
    if asked.source or asked.config_id:
        raise Refused("The stub has no prefilled scores")
    value, kind = checked(asked.value, asked.data_type.value if asked.data_type else None)
    of = {"trace": asked.trace_id, "session": asked.session_id, "experiment": asked.dataset_run_id}
    subject = [{"kind": name, "id": id_} for name, id_ in of.items() if id_]
    if asked.observation_id and asked.trace_id:
        subject[0] |= {"kind": "observation", "id": asked.observation_id, "traceId": asked.trace_id}
    if len(subject) != 1 or (asked.observation_id and not asked.trace_id):
        raise Refused("expected a traceId, sessionId or datasetRunId, observationId with traceId")
    return Score(
        id=asked.id or uuid.uuid4().hex,
        name=asked.name,
        value=value,
        data_type=kind,
        subject=subject[0],
        comment=asked.comment,
        queue_id=asked.queue_id,
        environment=asked.environment or "default",
        metadata=asked.metadata,
        timestamp=asked.timestamp.timestamp() if asked.timestamp else time.time(),
    )


def checked(value: Any, kind: str | None) -> tuple[Any, str]:
    """The value and the data type that it is kept with. Raises Refused."""
    number = isinstance(value, int | float)
    kind = kind or ("NUMERIC" if number else "CATEGORICAL")
    if kind not in _TYPES or (kind in ("NUMERIC", "BOOLEAN")) != number:
        raise Refused(f"got the value {value!r:.60} for a {kind} score")
    if kind == "BOOLEAN" and value not in (0, 1):
        raise Refused(f"got {value!r}, expected 0 or 1")
    return bool(value) if kind == "BOOLEAN" else value, kind
