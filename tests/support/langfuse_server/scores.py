"""Scores as the API takes and gives them, and the configurations that bound them."""

import re
import time
import uuid
from dataclasses import dataclass, field, replace
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

    @property
    def trace_id(self) -> str | None:
        """The trace that it is about, itself or by one of its observations."""
        kind = self.subject["kind"]
        return self.subject["id"] if kind == "trace" else self.subject.get("traceId")

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
            one |= {
                "comment": self.comment,
                "configId": self.config_id,
                "metadata": self.metadata or {},
            }
        if "subject" in groups:
            one["subject"] = self.subject
        if "annotation" in groups:
            one |= {"authorUserId": self.author, "queueId": self.queue_id}
        return one


def score_of(sent: Any, configs: dict[str, dict[str, Any]]) -> Score:
    """The score of one entry of ``POST /api/public/scores``. Raises Refused."""
    try:
        asked: CreateScoreRequest = parse_obj_as(CreateScoreRequest, sent)
    except ValidationError as error:
        raise Refused(f"Invalid request data: {error}") from error
    if unknown := set(asked.model_extra or ()):
        raise Refused(f"Unrecognized keys: {sorted(unknown)}")
    if not _ENVIRONMENT.fullmatch(asked.environment or "default"):
        raise Refused(f"Invalid environment {asked.environment!r}")
    source = str(asked.source.value if asked.source else "API")
    kind = asked.data_type.value if asked.data_type else None
    config = configs.get(asked.config_id) if asked.config_id else None
    if asked.config_id and config is None:
        raise Refused(f"No score config {asked.config_id}")
    if source == "ANNOTATION" and config is None and kind != "CORRECTION":
        raise Refused("configId is required with source ANNOTATION")
    value, kind = checked(asked.name, asked.value, kind, config)
    now = time.time()
    return Score(
        id=asked.id or uuid.uuid4().hex,
        name="output" if kind == "CORRECTION" else asked.name,
        value=value,
        data_type=kind,
        subject=_subject(asked),
        source=source,
        comment=asked.comment,
        config_id=asked.config_id,
        queue_id=asked.queue_id,
        environment=asked.environment or "default",
        metadata=asked.metadata,
        timestamp=asked.timestamp.timestamp() if asked.timestamp else now,
    )


def checked(
    name: str, value: Any, kind: str | None, config: dict[str, Any] | None
) -> tuple[Any, str]:
    """The value and the data type that it is kept with. Raises Refused."""
    if config is not None:
        kind = config["dataType"]
        if name != config["name"]:
            raise Refused(f"got the name {name!r}, expected the config's: {config['name']!r}")
        _within(value, config)
    number = isinstance(value, int | float)
    kind = kind or ("NUMERIC" if number else "CATEGORICAL")
    if kind not in _TYPES:
        raise Refused(f"Unknown data type {kind!r}")
    if (kind in ("NUMERIC", "BOOLEAN")) != number:
        raise Refused(f"got the value {value!r:.60} for a {kind} score")
    if kind == "BOOLEAN":
        if value not in (0, 1):
            raise Refused(f"got {value!r}, expected 0 or 1")
        return bool(value), kind
    if kind == "TEXT" and not 1 <= len(value) <= 500:
        raise Refused(f"got a text of {len(value)} characters, expected 1 to 500")
    return value, kind


def _within(value: Any, config: dict[str, Any]) -> None:
    low, high = config.get("minValue"), config.get("maxValue")
    too_low = low is not None and value < low
    if config["dataType"] == "NUMERIC" and (too_low or (high is not None and value > high)):
        raise Refused(f"got {value}, expected {low} to {high}")
    if config["dataType"] == "CATEGORICAL":
        labels = [one["label"] for one in config["categories"]]
        if value not in labels:
            raise Refused(f"got {value!r}, expected one of {labels}")


def _subject(asked: CreateScoreRequest) -> dict[str, str]:
    of = {"trace": asked.trace_id, "session": asked.session_id, "experiment": asked.dataset_run_id}
    given = {kind: id_ for kind, id_ in of.items() if id_}
    if len(given) != 1 or (asked.observation_id and "trace" not in given):
        raise Refused(
            "expected one of traceId, sessionId, datasetRunId; observationId with traceId"
        )
    if asked.observation_id:
        trace = given["trace"]
        return {"kind": "observation", "id": asked.observation_id, "traceId": trace}
    [(kind, id_)] = given.items()
    return {"kind": kind, "id": id_}


def merged(kept: Score, new: Score) -> Score:
    """A score that was sent again: it replaces the other, and keeps when it was made."""
    return replace(new, created=kept.created, updated=time.time())
