"""What the list endpoints of the API choose: filters, cursors, limits. Raises Refused (400)."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from tests.support.langfuse_server.scores import Refused, Score
from tests.support.langfuse_server.spans import Span

T = TypeVar("T")
Query = dict[str, list[str]]
#: The groups of fields of ``GET /api/public/v2/observations``; `core` is always given.
GROUPS: frozenset[str] = frozenset(
    {"core", "basic", "time", "io", "metadata", "model"}
    | {"usage", "prompt", "metrics", "trace_context"}
)
SCORE_GROUPS = frozenset(("details", "subject", "annotation"))
_OBSERVATION_PARAMS = frozenset(
    {"fields", "expandMetadata", "limit", "cursor", "filter", "name", "userId", "sessionId"}
    | {"type", "traceId", "level", "version", "parentObservationId", "isRootObservation"}
    | {"environment", "fromStartTime", "toStartTime"}
)
_SCORE_PARAMS: dict[str, Callable[[Score], Any]] = {
    "id": lambda s: s.id,
    "name": lambda s: s.name,
    "source": lambda s: s.source,
    "dataType": lambda s: s.data_type,
    "environment": lambda s: s.environment,
    "configId": lambda s: s.config_id,
    "queueId": lambda s: s.queue_id,
    "authorUserId": lambda s: s.author,
    "traceId": lambda s: s.trace_id,
    "sessionId": lambda s: s.subject["id"] if s.subject["kind"] == "session" else None,
    "observationId": lambda s: s.subject["id"] if s.subject["kind"] == "observation" else None,
}
_COLUMNS: dict[str, Callable[[Span], Any]] = {
    "id": lambda s: s.id,
    "type": lambda s: s.type.upper(),
    "name": lambda s: s.name,
    "traceId": lambda s: s.trace_id,
    "startTime": lambda s: s.start / 1e9,
    "environment": lambda s: s.environment,
    "level": lambda s: s.attributes.get("langfuse.observation.level", "DEFAULT"),
    "version": lambda s: s.attributes.get("langfuse.version"),
    "userId": lambda s: s.attributes.get("user.id"),
    "sessionId": lambda s: s.attributes.get("session.id"),
    "isRootObservation": lambda s: s.is_root,
    "traceName": lambda s: s.attributes.get("langfuse.trace.name"),
    "tags": lambda s: s.attributes.get("langfuse.trace.tags") or (),
}


def groups_of(query: Query, known: frozenset[str]) -> set[str]:
    """The groups of fields that are asked for. An unknown one is refused."""
    asked = {one.strip() for one in _one(query, "fields", "").split(",") if one.strip()}
    if unknown := asked - known:
        raise Refused(f"Unknown field groups: {sorted(unknown)}")
    return asked or ({"core", "basic"} if known is GROUPS else set())


def page(
    rows: Sequence[T], query: Query, at: Callable[[T], float], most: int
) -> tuple[list[T], str | None, int]:
    """One page of rows, newest first, the cursor of the next, and the limit."""
    limit = int(_one(query, "limit", "50"))
    if not 1 <= limit <= most:
        raise Refused(f"got limit={limit}, expected 1 to {most}")
    ordered = sorted(rows, key=at, reverse=True)  # stable: equal times keep their order
    start = 0
    if cursor := _one(query, "cursor", ""):
        start = json.loads(base64.urlsafe_b64decode(cursor))["after"]
    more = start + limit < len(ordered)
    following = base64.urlsafe_b64encode(json.dumps({"after": start + limit}).encode()).decode()
    return ordered[start : start + limit], following if more else None, limit


def chosen_scores(rows: Sequence[Score], query: Query) -> list[Score]:
    """Those that the query's filters let through."""
    known = {"fields", "limit", "cursor", "fromTimestamp", "toTimestamp", *_SCORE_PARAMS}
    if unknown := set(query) - known:
        raise Refused(f"The stub has no filter {sorted(unknown)}")
    if "observationId" in query and "traceId" not in query:
        raise Refused("observationId requires traceId")
    found = list(rows)
    for name, of in _SCORE_PARAMS.items():
        if name in query:
            wanted = set(_one(query, name).split(","))
            if name in ("source", "dataType"):
                wanted = {one.upper() for one in wanted}
            found = [one for one in found if of(one) in wanted]
    if since := _one(query, "fromTimestamp", ""):
        found = [one for one in found if one.timestamp >= _seconds(since)]
    if until := _one(query, "toTimestamp", ""):
        found = [one for one in found if one.timestamp < _seconds(until)]
    return found


def chosen_spans(rows: Sequence[Span], query: Query) -> list[Span]:
    """Those that the query's filters let through. `filter` takes precedence over the others."""
    if "parseIoAsJson" in query:
        raise Refused("parseIoAsJson is deprecated")
    if unknown := set(query) - _OBSERVATION_PARAMS:
        raise Refused(f"The stub has no filter {sorted(unknown)}")
    if "filter" in query:
        conditions = json.loads(_one(query, "filter"))
        return [one for one in rows if all(_holds(one, rule) for rule in conditions)]
    found = list(rows)
    plain = set(query) & {"name", "userId", "sessionId", "traceId", "level", "version", "type"}
    for name in plain:
        found = [one for one in found if _COLUMNS[name](one) == _one(query, name)]
    if "parentObservationId" in query:
        found = [one for one in found if one.parent == _one(query, "parentObservationId")]
    if "isRootObservation" in query:
        wanted = _one(query, "isRootObservation").lower() == "true"
        found = [one for one in found if one.is_root == wanted]
    if "environment" in query:
        found = [one for one in found if one.environment in query["environment"]]
    if since := _one(query, "fromStartTime", ""):
        found = [one for one in found if one.start / 1e9 >= _seconds(since)]
    if until := _one(query, "toStartTime", ""):
        found = [one for one in found if one.start / 1e9 < _seconds(until)]
    return found


def _holds(span: Span, rule: dict[str, Any]) -> bool:
    kind, column, operator = rule["type"], rule["column"], rule["operator"]
    if kind == "stringObject" and column == "metadata" and operator == "=":
        return span.metadata.get(rule["key"]) == rule["value"]
    if column not in _COLUMNS:
        raise Refused(f"The stub has no column {column!r}")
    got, value = _COLUMNS[column](span), rule["value"]
    if kind == "stringOptions":
        return (got in value) == (operator == "any of")
    if kind == "arrayOptions" and operator == "any of":
        return bool(set(got) & set(value))
    if kind == "string" and operator == "=":
        return got == value
    if kind == "string" and operator == "starts with":
        return str(got).startswith(value)
    if kind == "boolean" and operator == "=":
        return got is value
    if kind == "datetime":
        at = _seconds(value)
        return {">": got > at, "<": got < at, ">=": got >= at, "<=": got <= at}[operator]
    raise Refused(f"The stub has no {kind} {operator!r}")


def _one(query: Query, name: str, default: str | None = None) -> str:
    found = query.get(name, [default] if default is not None else [])
    return found[-1]


def _seconds(written: str) -> float:
    return datetime.fromisoformat(written.replace("Z", "+00:00")).timestamp()
