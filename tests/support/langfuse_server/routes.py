"""What the server answers, by method and path. Replies are the SDK's own response models."""

from __future__ import annotations

import base64
import json
import re
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from langfuse.api import (
    AnnotationQueue,
    AnnotationQueueItem,
    CreateScoreBatchResponse,
    CreateScoreBatchResults,
    GetScoresV3Response,
    Model,
    ObservationsV2Response,
    PaginatedAnnotationQueueItems,
    PaginatedAnnotationQueues,
    ScoreConfig,
    ScoreConfigs,
)
from langfuse.api.core.pydantic_utilities import parse_obj_as
from pydantic import BaseModel

from tests.support.langfuse_server.records import Refused, Span, iso, score_of, spans_of

if TYPE_CHECKING:
    from tests.support.langfuse_server.server import LangfuseServer

PROJECT = "project-1"
_CONFIG_NAME = re.compile(r"[\w .()\-]{1,35}", re.ASCII)
Answer = tuple[int, Any]
T = TypeVar("T")
Query = dict[str, list[str]]
#: The groups of fields that are asked for; `core` is always given.
_GROUPS = frozenset({"core", "basic", "time", "io", "metadata", "model"})
_SCORE_GROUPS = frozenset(("details", "subject", "annotation"))
_SPAN_FILTERS = frozenset({"isRootObservation", "environment", "fromStartTime", "filter"})
_SCORE_FILTERS = frozenset({"name", "source", "environment", "fromTimestamp"})


def answer(server: LangfuseServer, method: str, path: str, query: Query, body: Any) -> Answer:
    """Status and JSON of one request."""
    for verb, pattern, route in _ROUTES:
        if verb == method and (found := re.fullmatch(pattern, path)):
            return route(server, query, body, *found.groups())
    return 404, {"message": f"not found: {method} {path}", "error": "LangfuseNotFoundError"}


def _ingest(server: LangfuseServer, query: Query, body: bytes) -> Answer:
    with server.lock:
        server.spans += spans_of(body, time.time())
    return 200, b""


def _post_scores(server: LangfuseServer, query: Query, body: Any) -> Answer:
    # 4.59 is the first that takes a list
    # (langfuse.com/docs/observability/sdk/upgrade-path/python-v4-to-v5).
    if server.is_old or not isinstance(body, list) or not body:
        expected = "an object" if server.is_old else "a list of scores"
        return 400, {"message": f"Invalid request data: expected {expected}"}
    errors: list[dict[str, str]] = []
    for entry in body:
        try:
            score = score_of(entry)
            if reason := server.refuses(score):
                raise Refused(reason)
        except Refused as refused:
            errors.append({"message": str(refused)})
        else:
            server.keep(score)
    if not errors:
        return 202, _made(CreateScoreBatchResponse, {"message": "Accepted"})
    told = {"accepted": len(body) - len(errors), "rejected": len(errors), "errors": errors}
    return 207, _made(CreateScoreBatchResults, told)


def _get_scores(server: LangfuseServer, query: Query, body: Any) -> Answer:
    groups = _groups(query, _SCORE_GROUPS, _SCORE_FILTERS)
    found = [*server.scores.values()]
    for name in ("name", "source", "environment"):
        if name in query:
            wanted = query[name][-1].split(",")
            found = [one for one in found if getattr(one, name) in wanted]
    if since := _seconds(query, "fromTimestamp"):
        found = [one for one in found if one.timestamp >= since]
    some, cursor, limit = _page(found, query, lambda one: one.timestamp, most=100)
    data = [one.public(groups, PROJECT) for one in some]
    return 200, _made(GetScoresV3Response, {"data": data, "meta": {"limit": limit} | cursor})


def _get_observations(server: LangfuseServer, query: Query, body: Any) -> Answer:
    groups = _groups(query, _GROUPS, _SPAN_FILTERS) or {"core", "basic"}
    expanded = set(",".join(query.get("expandMetadata", [])).split(","))
    found = [*server.spans]
    if "filter" in query:  # it takes precedence over the others
        conditions = json.loads(query["filter"][-1])
        found = [one for one in found if all(_holds(one, rule) for rule in conditions)]
    else:
        if "isRootObservation" in query:
            wanted = query["isRootObservation"][-1].lower() == "true"
            found = [one for one in found if one.is_root == wanted]
        if "environment" in query:
            found = [one for one in found if one.environment in query["environment"]]
        if since := _seconds(query, "fromStartTime"):
            found = [one for one in found if one.start / 1e9 >= since]
    some, cursor, _ = _page(found, query, lambda one: one.start, most=1000)
    data = [one.observation(groups, expanded, PROJECT) for one in some]
    return 200, _made(ObservationsV2Response, {"data": data, "meta": cursor})


def _groups(query: Query, known: frozenset[str], filters: frozenset[str]) -> set[str]:
    """The groups of fields that are asked for. An unknown one, or another filter, is refused."""
    asked = {one.strip() for one in query.get("fields", [""])[-1].split(",") if one.strip()}
    more = set(query) - filters - {"fields", "expandMetadata", "limit", "cursor"}
    if unknown := (asked - known) | more:
        raise Refused(f"Unknown field groups or filters: {sorted(unknown)}")
    return asked


def _holds(span: Span, rule: dict[str, Any]) -> bool:
    match rule["type"], rule["column"], rule["operator"]:
        case "stringOptions", "traceId", "any of":
            return span.trace_id in rule["value"]
        case "boolean", "isRootObservation", "=":
            return span.is_root is rule["value"]
        case unknown:
            raise Refused(f"The stub has no filter {unknown}")


def _page(
    rows: Sequence[T], query: Query, at: Callable[[T], float], most: int
) -> tuple[list[T], dict[str, str], int]:
    """One page of rows, newest first, the cursor of the next, and the limit."""
    limit = int(query.get("limit", ["50"])[-1])
    if not 1 <= limit <= most:
        raise Refused(f"got limit={limit}, expected 1 to {most}")
    ordered = sorted(rows, key=at, reverse=True)  # stable: equal times keep their order
    start = int(base64.urlsafe_b64decode(query["cursor"][-1])) if "cursor" in query else 0
    after = base64.urlsafe_b64encode(str(start + limit).encode()).decode()
    more = start + limit < len(ordered)
    return ordered[start : start + limit], {"cursor": after} if more else {}, limit


def _seconds(query: Query, name: str) -> float | None:
    if name not in query:
        return None
    return datetime.fromisoformat(query[name][-1].replace("Z", "+00:00")).timestamp()


def _make_config(server: LangfuseServer, query: Query, body: Any) -> Answer:
    if not _CONFIG_NAME.fullmatch(body["name"]) or body["dataType"] != "NUMERIC":
        return 400, {"message": f"Invalid name {body['name']!r}, or not numeric"}
    more = {"categories": None, "projectId": PROJECT, "isArchived": False}
    return _kept(ScoreConfig, server.configs, body | more)


def _get_configs(server: LangfuseServer, query: Query, body: Any) -> Answer:
    return _numbered(ScoreConfigs, list(server.configs.values()), query)


def _make_model(server: LangfuseServer, query: Query, body: Any) -> Answer:
    re.compile(body["matchPattern"])
    if any(one["modelName"] == body["modelName"] for one in server.models):
        return 400, {"message": f"Model name '{body['modelName']}' already exists in project"}
    model = {
        "id": uuid.uuid4().hex,
        **body,
        "tokenizerConfig": None,
        "isLangfuseManaged": False,
        "createdAt": iso(time.time()),
        "prices": {side: {"price": body[f"{side}Price"]} for side in ("input", "output")},
        "pricingTiers": [],
    }
    server.models.append(model)
    return 200, _made(Model, model)


def _make_queue(server: LangfuseServer, query: Query, body: Any) -> Answer:
    if unknown := set(body["scoreConfigIds"]) - set(server.configs):
        return 400, {"message": f"Unknown score configs {sorted(unknown)}"}
    if any(one["name"] == body["name"] for one in server.queues.values()):
        return 400, {"message": f"A queue with name '{body['name']}' already exists"}
    return _kept(AnnotationQueue, server.queues, {"description": None} | body)


def _get_queues(server: LangfuseServer, query: Query, body: Any) -> Answer:
    return _numbered(PaginatedAnnotationQueues, list(server.queues.values()), query)


def _make_item(server: LangfuseServer, query: Query, body: Any, queue_id: str) -> Answer:
    # The same object again is one more item: the real server does not look whether it is there.
    item = {"queueId": queue_id, "status": "PENDING"} | body
    return _kept(AnnotationQueueItem, server.items, item)


def _get_items(server: LangfuseServer, query: Query, body: Any, queue_id: str) -> Answer:
    items = [one for one in server.items.values() if one["queueId"] == queue_id]
    return _numbered(PaginatedAnnotationQueueItems, items, query)


def _kept(model: type[BaseModel], rows: dict[str, dict[str, Any]], given: dict[str, Any]) -> Answer:
    now = iso(time.time())
    one = {"id": uuid.uuid4().hex, "createdAt": now, "updatedAt": now} | given
    rows[one["id"]] = one
    return 200, _made(model, one)


def _numbered(model: type[BaseModel], rows: list[dict[str, Any]], query: Query) -> Answer:
    """A page of the lists that have numbered pages."""
    limit, number = int(query.get("limit", ["50"])[0]), int(query.get("page", ["1"])[0])
    if not 1 <= limit <= 100:
        return 400, {"message": f"got limit={limit}, expected 1 to 100"}
    pages = -(-len(rows) // limit)
    meta = {"page": number, "limit": limit, "totalItems": len(rows), "totalPages": pages}
    return 200, _made(model, {"data": rows[(number - 1) * limit : number * limit], "meta": meta})


def _made(model: type[BaseModel], reply: dict[str, Any]) -> Any:
    """The reply, as the SDK's model of it gives it. Raises where the SDK would refuse it."""
    made = parse_obj_as(model, reply)
    assert not made.model_extra, f"{model.__name__} has no {sorted(made.model_extra)}"
    return reply


_QUEUE = "/api/public/annotation-queues"
_ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("POST", "/api/public/otel/v1/traces", _ingest),
    ("POST", "/api/public/scores", _post_scores),
    ("GET", "/api/public/v3/scores", _get_scores),
    ("GET", "/api/public/v2/observations", _get_observations),
    ("POST", "/api/public/score-configs", _make_config),
    ("GET", "/api/public/score-configs", _get_configs),
    ("POST", "/api/public/models", _make_model),
    ("POST", _QUEUE, _make_queue),
    ("GET", _QUEUE, _get_queues),
    ("POST", f"{_QUEUE}/([^/]+)/items", _make_item),
    ("GET", f"{_QUEUE}/([^/]+)/items", _get_items),
]
