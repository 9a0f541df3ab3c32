"""Paths of the HTTP API, and how its answers are read."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from langchain_art.client.http_request import Flow, Param, Request
from langchain_art.errors import BodyTooLarge, ConfigError
from langchain_art.wire import (
    MAX_REVIEWS,
    RefusedReview,
    Review,
    Reviews,
    ReviewsKept,
    TrajectoryGroup,
)

log = logging.getLogger(__name__)
ModelT = TypeVar("ModelT", bound=BaseModel)
#: The most that the server gives at once.
_PAGE = 1000


class HasId(Protocol):
    """A run: that of `capture()`, or a `Trajectory`."""

    @property
    def id(self) -> str:
        """Id of the item."""
        ...


def run_path(run: HasId | str, *parts: str) -> str:
    """The path of a run, given itself or its id. Raises ConfigError."""
    id_: Any = run if isinstance(run, str) else getattr(run, "id", None)
    if not isinstance(id_, str) or not id_:
        raise ConfigError(f"got the run {run!r:.200}, expected a run of capture() or its id")
    return path_of("trajectories", id_, *parts)


def path_of(*parts: str | int) -> str:
    """``/v1/jobs/job-1``, quoted."""
    return "/".join(["/v1", *(quote(str(part), safe="") for part in parts)])


def version_path(policy: str, version: int, *parts: str) -> str:
    """The path of a version, or of what is below it."""
    return path_of("policies", policy, "checkpoints", version, *parts)


def many(model: type[ModelT]) -> Callable[[bytes], list[ModelT]]:
    """Reader of ``{"data": [...]}``."""
    return lambda content: [model.model_validate(item) for item in json.loads(content)["data"]]


def pages(
    path: str,
    model: type[ModelT],
    params: Mapping[str, Param],
    limit: int | None = None,
    after: str | None = None,
) -> Flow[list[ModelT]]:
    """The first `limit` items of a list `after` one, or all, page by page."""
    found: list[ModelT] = []

    def read(content: bytes) -> str | None:
        page = json.loads(content)
        found.extend(map(model.model_validate, page["data"]))
        for message in page.get("damaged", ()):
            _warn_once(message)
        return page["last_id"] if page["has_more"] else None

    while limit is None or len(found) < limit:
        size = _PAGE if limit is None else min(_PAGE, limit - len(found))
        after = yield Request("GET", path, read, {**params, "limit": size, "after": after})
        if after is None:
            break
    return found


@lru_cache(maxsize=_PAGE)
def _warn_once(message: str) -> None:
    """Warn, unless it is among the last that were said: who follows a job reads its list again."""
    log.warning("A list leaves a row out. %s", message)


def deleted(content: bytes) -> str:
    """Name of what was deleted, from an answer."""
    return str(json.loads(content)["deleted"])


def stored_of(content: bytes) -> int:
    """Number of trajectories that an answer says are new."""
    return int(json.loads(content)["stored"])


def post_group(group: TrajectoryGroup) -> Flow[int]:
    """Store a group, in parts if it is too large for one request; how many runs were new."""
    try:
        return (yield Request("POST", "/v1/groups", stored_of, body=group))
    except BodyTooLarge:
        runs = group.trajectories
        if len(runs) == 1:
            raise
        stored, half = 0, len(runs) // 2
        for part in (runs[:half], runs[half:]):
            stored += yield from post_group(group.model_copy(update={"trajectories": part}))
        return stored


def put_all(reviews: Sequence[Review]) -> Flow[ReviewsKept]:
    """Keep any number of reviews; what became of them all."""
    counts: Counter[str] = Counter()
    refused: list[RefusedReview] = []
    trained: dict[str, tuple[str, ...]] = {}
    for start in range(0, len(reviews), MAX_REVIEWS):
        some = Reviews(reviews=tuple(reviews[start : start + MAX_REVIEWS]))
        kept = yield Request("PUT", "/v1/reviews", ReviewsKept.model_validate_json, body=some)
        counts.update(kept.model_dump(exclude={"refused", "trained"}))
        refused += kept.refused
        trained |= kept.trained
    return ReviewsKept(**counts, refused=tuple(refused), trained=trained)
