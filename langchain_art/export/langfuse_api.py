"""Langfuse's API as it is read: the connection, whole lists, and its errors in words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from pydantic import ValidationError

from langchain_art.errors import ArtError, ConfigError, ServerUnreachable
from langchain_art.export.ids import HUMAN_REWARD

if TYPE_CHECKING:
    from langfuse.api import LangfuseAPI, ObservationV2, ScoreV3

ReadT = TypeVar("ReadT", "ObservationV2", "ScoreV3")
#: Langfuse's own address, where none is given.
CLOUD = "https://cloud.langfuse.com"
#: The most that one page of a list has, by the API's limits.
_SCORES, _OBSERVATIONS, _NUMBERED = 100, 1000, 100
#: Traces in one filter: a request's address has room for them.
_TRACES = 50


def connect() -> LangfuseAPI:
    """Langfuse's API at ``LANGFUSE_BASE_URL``, with the keys of the environment.

    Raises:
        ConfigError: the SDK is not installed, or there is no key.
    """
    try:
        from langfuse.api import LangfuseAPI  # noqa: PLC0415 - optional, and takes 0.6 s
    except ImportError as error:
        raise ConfigError(
            "Langfuse's SDK (version 5) is not installed here; run: pip install \"langchain-art"
            '[langfuse]"'
        ) from error
    public, secret = keys()
    return LangfuseAPI(
        base_url=address(),
        x_langfuse_public_key=public,
        username=public,
        password=secret,
        timeout=30.0,
    )


def keys() -> tuple[str, str]:
    """The public and the secret key: ``LANGFUSE_PUBLIC_KEY``, ``LANGFUSE_SECRET_KEY``.

    Raises:
        ConfigError: one is missing.
    """
    names = ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")
    if missing := [name for name in names if not os.environ.get(name)]:
        raise ConfigError(
            f"got no {' and no '.join(missing)} in the environment, expected the keys of a project "
            "of Langfuse (its settings, under API keys)"
        )
    return os.environ[names[0]], os.environ[names[1]]


def address() -> str:
    """Address of Langfuse: ``LANGFUSE_BASE_URL``, the older ``LANGFUSE_HOST``, or its cloud."""
    found = os.environ.get("LANGFUSE_BASE_URL") or os.environ.get("LANGFUSE_HOST") or CLOUD
    return found.rstrip("/")


@contextmanager
def in_words(doing: str) -> Generator[None]:
    """Turn the SDK's errors into those of langchain-art; `doing` says what was being done.

    Raises:
        ConfigError: Langfuse refuses the keys, or has no such endpoint.
        ServerUnreachable: it gives no answer, or one of a server that fails.
        ArtError: it refuses the request.
    """
    from langfuse.api.core import ApiError  # noqa: PLC0415

    where = f"Langfuse at {address()}"
    try:
        yield
    except httpx.TransportError as error:
        raise ServerUnreachable(f"{where} gave no answer to {doing}: {error!r:.200}") from error
    except ApiError as error:
        status, said = error.status_code, f"{error.body!r:.300}"
        if status in (401, 403):
            raise ConfigError(
                f"{where} refuses the keys of the environment ({said}); check LANGFUSE_PUBLIC_KEY, "
                "LANGFUSE_SECRET_KEY and LANGFUSE_BASE_URL"
            ) from error
        if status == 404:
            raise ConfigError(
                f"{where} has no endpoint to {doing} ({said}), expected Langfuse Cloud or a server "
                "of version 4.59.0 or later"
            ) from error
        if status is not None and (status >= 500 or status == 429):
            raise ServerUnreachable(f"{where} answers {status} to {doing}: {said}") from error
        raise ArtError(f"{where} answers {status} to {doing}: {said}") from error


def scores(
    api: LangfuseAPI,
    *,
    source: str,
    name: str | None = None,
    environment: str | None = None,
    since: datetime | None = None,
) -> Iterator[ScoreV3]:
    """All scores of a `source` (``ANNOTATION``: people's, ``API``: programs'), newest first.

    With `since` only those whose timestamp is not earlier. A revision keeps its score's timestamp.
    """
    asked = {"source": source, "name": name, "environment": environment, "from_timestamp": since}
    asked |= {"fields": "details,subject,annotation", "limit": _SCORES}
    with in_words("read scores"):
        rows = list(_pages(api.scores.get_many, asked))
    yield from latest(rows)


def is_prefilled(score: ScoreV3) -> bool:
    """True if a program put the score there for a person to verify, and none has saved it.

    What a person saves in the interface has an author.
    """
    return score.source == "ANNOTATION" and score.author_user_id is None


def values(api: LangfuseAPI, name: str, since: datetime | None = None) -> dict[str, list[float]]:
    """The numbers and booleans that a score has, by the id of the trace or observation.

    `HUMAN_REWARD` counts where people gave it in the interface; a score of another name may be a
    program's, such as a run's own reward. Prefilled ones are nobody's.
    """
    found: dict[str, list[float]] = {}
    source = "ANNOTATION" if name == HUMAN_REWARD else "ANNOTATION,API"
    for one in scores(api, source=source, name=name, since=since):
        number = one.data_type in ("NUMERIC", "BOOLEAN")
        if one.subject is not None and number and not is_prefilled(one):
            found.setdefault(one.subject.id, []).append(float(one.value))
    return found


def observations(
    api: LangfuseAPI,
    traces: Iterable[str],
    *,
    fields: str,
    expand: str | None = None,
    roots_alone: bool = False,
) -> Iterator[ObservationV2]:
    """The observations of traces, each once, as it was sent last.

    Until ClickHouse merges them, Langfuse lists all rows of one that was sent again. Of the groups
    `fields`, ``core`` and ``time`` are always given; `expand` are keys of metadata that are not cut
    at 200 characters, by commas.
    """
    root = {"type": "boolean", "column": "isRootObservation", "operator": "=", "value": True}
    wanted = list(dict.fromkeys(traces))
    for start in range(0, len(wanted), _TRACES):
        some = wanted[start : start + _TRACES]
        rule = {"type": "stringOptions", "column": "traceId", "operator": "any of", "value": some}
        rules = [rule, root] if roots_alone else [rule]
        asked = {"filter": json.dumps(rules), "fields": f"{fields},time", "limit": _OBSERVATIONS}
        with in_words("read observations"):
            rows = list(_pages(api.observations.get_many, asked | {"expand_metadata": expand}))
        yield from latest(rows)


def roots(
    api: LangfuseAPI, since: datetime | None, environment: str | None, limit: int
) -> Iterator[ObservationV2]:
    """The root observations of the newest traces, of an `environment`, begun `since`, each once."""
    asked = {"from_start_time": since, "environment": environment, "is_root_observation": True}
    asked |= {"fields": "core", "limit": min(limit, _OBSERVATIONS)}
    with in_words("read traces"):
        yield from islice(_once(_pages(api.observations.get_many, asked)), limit)


def observation_of(line: Mapping[str, Any]) -> ObservationV2:
    """An observation of its JSON, as the API and the exports write it. Raises ConfigError."""
    from langfuse.api import ObservationV2  # noqa: PLC0415 - optional
    from langfuse.api.core.pydantic_utilities import parse_obj_as  # noqa: PLC0415

    try:
        return parse_obj_as(ObservationV2, dict(line))
    except ValidationError as error:
        raise ConfigError(f"This is no observation of Langfuse: {error}") from error


def numbered(read: Callable[..., Any], **asked: Any) -> list[Any]:
    """All items of a list that has numbered pages."""
    found: list[Any] = []
    page = pages = 1
    while page <= pages:
        got = read(page=page, limit=_NUMBERED, **asked)
        found += got.data
        page, pages = page + 1, got.meta.total_pages
    return found


def _pages(read: Callable[..., Any], asked: dict[str, Any]) -> Iterator[Any]:
    given = {name: value for name, value in asked.items() if value is not None}
    cursor: str | None = None
    while True:
        got = read(**given, **({"cursor": cursor} if cursor else {}))
        yield from got.data
        cursor = got.meta.cursor
        if not cursor:
            return


def latest(rows: Iterable[ReadT]) -> list[ReadT]:
    """The row of each id that was written last; of rows that do not tell, the first."""
    found: dict[str, ReadT] = {}
    for one in rows:
        known = found.setdefault(one.id, one)
        if one.updated_at and known.updated_at and known.updated_at < one.updated_at:
            found[one.id] = one
    return list(found.values())


def _once(items: Iterable[Any]) -> Iterator[Any]:
    seen: set[str] = set()
    for one in items:
        if one.id not in seen:
            seen.add(one.id)
            yield one
