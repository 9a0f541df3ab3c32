"""Scores as the API takes and gives them, and the configurations that bound them."""

import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from langfuse.api import CreateScoreRequest
from langfuse.api.core.pydantic_utilities import parse_obj_as
from pydantic import ValidationError

from tests.support.langfuse_server.spans import iso

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
