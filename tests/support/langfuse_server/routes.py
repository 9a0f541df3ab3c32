"""What the server answers, by method and path. Replies are the SDK's own response models."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
    Projects,
    ScoreConfig,
    ScoreConfigs,
)
from langfuse.api.core.pydantic_utilities import parse_obj_as
from pydantic import BaseModel

from tests.support.langfuse_server.queries import (
    GROUPS,
    SCORE_GROUPS,
    Query,
    chosen_scores,
    chosen_spans,
    groups_of,
    page,
)
from tests.support.langfuse_server.scores import Refused, score_of
from tests.support.langfuse_server.spans import iso, spans_of

if TYPE_CHECKING:
    from tests.support.langfuse_server.server import LangfuseServer

PROJECT = "project-1"
_CONFIG_NAME = re.compile(r"[\w .()\-]{1,35}", re.ASCII)
Answer = tuple[int, Any]


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
    if server.is_old:
        return 400, {"message": "Invalid request data: expected an object"}
    if not isinstance(body, list) or not body:
        return 400, {"message": "Invalid request data: expected a list of scores"}
    errors: list[dict[str, str]] = []
    for entry in body:
        try:
            score = score_of(entry, server.configs)
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
    groups = groups_of(query, SCORE_GROUPS)
    found = chosen_scores(server.visible_scores(), query)
    some, cursor, limit = page(found, query, lambda one: one.timestamp, most=100)
    data = [one.public(groups, PROJECT) for one in some]
    return 200, _made(GetScoresV3Response, {"data": data, "meta": _meta(cursor, limit=limit)})


def _get_observations(server: LangfuseServer, query: Query, body: Any) -> Answer:
    groups = groups_of(query, GROUPS)
    expanded = set(",".join(query.get("expandMetadata", [])).split(","))
    found = chosen_spans(server.visible_spans(), query)
    some, cursor, _ = page(found, query, lambda one: one.start, most=1000)
    data = [one.observation(groups, expanded, PROJECT) for one in some]
    return 200, _made(ObservationsV2Response, {"data": data, "meta": _meta(cursor)})


def _delete_score(server: LangfuseServer, query: Query, body: Any, score_id: str) -> Answer:
    server.delete([score_id])
    return 202, {"message": "Score deletion request submitted successfully"}


def _projects(server: LangfuseServer, query: Query, body: Any) -> Answer:
    one = {"id": PROJECT, "name": "art", "organization": {"id": "o", "name": "o"}, "metadata": {}}
    return 200, _made(Projects, {"data": [one]})


def _make_config(server: LangfuseServer, query: Query, body: Any) -> Answer:
    if not _CONFIG_NAME.fullmatch(body["name"]):
        return 400, {"message": f"Invalid name {body['name']!r}"}
    categories = body.get("categories")
    if (body["dataType"] == "CATEGORICAL") != bool(categories):
        return 400, {"message": "categories are for categorical scores, which need them"}
    if body["dataType"] == "BOOLEAN":
        categories = [{"label": "True", "value": 1}, {"label": "False", "value": 0}]
    config = {
        "id": uuid.uuid4().hex,
        **body,
        "categories": categories,
        "projectId": PROJECT,
        "isArchived": False,
        **_now(),
    }
    server.configs[config["id"]] = config
    return 200, _made(ScoreConfig, config)


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
        "createdAt": _now()["createdAt"],
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
    queue = {"id": uuid.uuid4().hex, "description": None, **body, **_now()}
    server.queues[queue["id"]] = queue
    return 200, _made(AnnotationQueue, queue)


def _get_queues(server: LangfuseServer, query: Query, body: Any) -> Answer:
    return _numbered(PaginatedAnnotationQueues, list(server.queues.values()), query)


def _make_item(server: LangfuseServer, query: Query, body: Any, queue_id: str) -> Answer:
    if queue_id not in server.queues:
        return 404, {"message": "Annotation queue not found"}
    # The same object again is one more item: the real server does not look whether it is there.
    item = {"id": uuid.uuid4().hex, "queueId": queue_id, "status": "PENDING", **body, **_now()}
    server.items[item["id"]] = item
    return 200, _made(AnnotationQueueItem, item)


def _get_items(server: LangfuseServer, query: Query, body: Any, queue_id: str) -> Answer:
    if queue_id not in server.queues:
        return 404, {"message": "Annotation queue not found"}
    items = [one for one in server.items.values() if one["queueId"] == queue_id]
    if status := query.get("status"):
        items = [one for one in items if one["status"] == status[0]]
    return _numbered(PaginatedAnnotationQueueItems, items, query)


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


def _meta(cursor: str | None, **more: Any) -> dict[str, Any]:
    return more | ({"cursor": cursor} if cursor else {})


def _now() -> dict[str, str]:
    return {"createdAt": iso(time.time()), "updatedAt": iso(time.time())}


_QUEUE = "/api/public/annotation-queues"
_ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("POST", "/api/public/otel/v1/traces", _ingest),
    ("POST", "/api/public/scores", _post_scores),
    ("GET", "/api/public/v3/scores", _get_scores),
    ("DELETE", "/api/public/scores/([^/]+)", _delete_score),
    ("GET", "/api/public/v2/observations", _get_observations),
    ("GET", "/api/public/projects", _projects),
    ("POST", "/api/public/score-configs", _make_config),
    ("GET", "/api/public/score-configs", _get_configs),
    ("POST", "/api/public/models", _make_model),
    ("POST", _QUEUE, _make_queue),
    ("GET", _QUEUE, _get_queues),
    ("POST", f"{_QUEUE}/([^/]+)/items", _make_item),
    ("GET", f"{_QUEUE}/([^/]+)/items", _get_items),
]
