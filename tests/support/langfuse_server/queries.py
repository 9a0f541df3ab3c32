"""What the list endpoints of the API choose: filters, cursors, limits. Raises Refused (400)."""

import base64
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from tests.support.langfuse_server.scores import Refused, Score
from tests.support.langfuse_server.spans import Span

T = TypeVar("T")
Query = dict[str, list[str]]
#: The groups of fields of ``GET /api/public/v2/observations`` that are asked for; `core` is always
#: given.
GROUPS: frozenset[str] = frozenset({"core", "basic", "time", "io", "metadata", "model"})
SCORE_GROUPS = frozenset(("details", "subject", "annotation"))
_OBSERVATION_PARAMS = frozenset(
    {"fields", "expandMetadata", "limit", "cursor", "filter"}
    | {"isRootObservation", "environment", "fromStartTime"}
)
_SCORE_PARAMS: dict[str, Callable[[Score], Any]] = {
    "name": lambda s: s.name,
    "source": lambda s: s.source,
    "environment": lambda s: s.environment,
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
    known = {"fields", "limit", "cursor", "fromTimestamp", *_SCORE_PARAMS}
    if unknown := set(query) - known:
        raise Refused(f"The stub has no filter {sorted(unknown)}")
    found = list(rows)
    for name, of in _SCORE_PARAMS.items():
        if name in query:
            wanted = _one(query, name).split(",")
            found = [one for one in found if of(one) in wanted]
    if since := _one(query, "fromTimestamp", ""):
        found = [one for one in found if one.timestamp >= _seconds(since)]
    return found


def chosen_spans(rows: Sequence[Span], query: Query) -> list[Span]:
    """Those that the query's filters let through. `filter` takes precedence over the others."""
    if unknown := set(query) - _OBSERVATION_PARAMS:
        raise Refused(f"The stub has no filter {sorted(unknown)}")
    if "filter" in query:
        conditions = json.loads(_one(query, "filter"))
        return [one for one in rows if all(_holds(one, rule) for rule in conditions)]
    found = list(rows)
    if "isRootObservation" in query:
        wanted = _one(query, "isRootObservation").lower() == "true"
        found = [one for one in found if one.is_root == wanted]
    if "environment" in query:
        found = [one for one in found if one.environment in query["environment"]]
    if since := _one(query, "fromStartTime", ""):
        found = [one for one in found if one.start / 1e9 >= _seconds(since)]
    return found


def _holds(span: Span, rule: dict[str, Any]) -> bool:
    match rule["type"], rule["column"], rule["operator"]:
        case "stringOptions", "traceId", "any of":
            return span.trace_id in rule["value"]
        case "boolean", "isRootObservation", "=":
            return span.is_root is rule["value"]
        case unknown:
            raise Refused(f"The stub has no filter {unknown}")


def _one(query: Query, name: str, default: str | None = None) -> str:
    found = query.get(name, [default] if default is not None else [])
    return found[-1]


def _seconds(written: str) -> float:
    return datetime.fromisoformat(written.replace("Z", "+00:00")).timestamp()
