"""One HTTP request as a value: arguments, answer, paths, when to retry it, what is said. No I/O.

Also the base of both clients, and how a method is made of an operation.
"""

from __future__ import annotations

import json
import logging
import os
import random
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, lru_cache, wraps
from pathlib import Path
from threading import Lock
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from langchain_art import errors, wire
from langchain_art.wire.base_urls import DEFAULT_BASE_URL, foreign_answer, no_answer, split_base_url
from langchain_art.wire.identifiers import unwritable

if TYPE_CHECKING:
    from langchain_art.client.async_client import AsyncArtClient
    from langchain_art.client.sync_client import ArtClient


log = logging.getLogger(__name__)
#: Seconds after which a server that never answered is taken for one that is not there. One that
#: did answer may be starting again, which takes as long as its model takes to load.
FIRST_ANSWER = 10.0
#: Seconds after which a request without an answer is spoken of.
SILENCE = 1.5
_REPEAT = 30.0


class Waiting:
    """Says why a client waits, and then that its server answers again. May be used by threads.

    The same words are said again only after half a minute, however many requests wait.
    """

    def __init__(self, base_url: str, say: Callable[[str], None] | None = None) -> None:
        self.base_url = base_url
        self.answered = False
        self._say = say or log.warning
        self._lock = Lock()
        self._since: float | None = None
        self._said: tuple[str, float] = ("", -_REPEAT)

    def because(self, why: str) -> None:
        """Say that the client waits, and why."""
        now = time.monotonic()
        with self._lock:
            words, at = self._said
            if words == why and now - at < _REPEAT:
                return
            self._since = now if self._since is None else self._since
            self._said = (why, now)
            waited = now - self._since
        after = f" (for {waited:.0f} s now)" if waited >= 1 else ""
        self._say(f"waiting for {self.base_url}: {why}{after}")

    def answer(self, status: int) -> None:
        """The server answered, unless it was only a proxy before it."""
        if status in (502, 504):
            return
        self.answered = True
        if status in (408, 429, 503):
            return
        with self._lock:
            since, self._since = self._since, None
        if since is not None:
            self._said = ("", -_REPEAT)
            self._say(f"{self.base_url} answers again, after {time.monotonic() - since:.0f} s")


def reason(failure: BaseException) -> str:
    """Reason why there was no answer, in a few words: ``connection refused``."""
    if isinstance(failure, errors.RequestRefused):
        return str(failure)
    if isinstance(failure, httpx.ConnectTimeout):
        return "no connection: the machine does not answer"
    if isinstance(failure, httpx.TimeoutException):
        return "no answer, though it takes connections"
    found = [failure]
    for one in found:  # grows by their causes while it is read
        if isinstance(one, ssl.SSLError):  # its number is none of the system's
            return f"no TLS connection: {one.strerror or one}"
        if isinstance(one, OSError) and one.errno is not None:
            # Numbers below 0 are those of a name that could not be looked up.
            return (os.strerror(one.errno) if one.errno > 0 else str(one.strerror)).lower()
        causes = [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            causes += cast("BaseExceptionGroup[BaseException]", one).exceptions
        found += [cause for cause in causes if cause is not None and cause not in found]
    return str(failure) or type(failure).__name__


T = TypeVar("T")
Param: TypeAlias = "str | float | Sequence[str] | None"

#: Failures after which the same request may be sent again.
RETRYABLE = (
    httpx.TransportError,
    errors.ServerUnreachable,
    errors.Overloaded,
    errors.EngineUnavailable,
    errors.RequestTimeout,
)
_BY_STATUS: dict[int, type[errors.RequestRefused]] = {
    403: errors.AuthenticationFailed,
    422: errors.InvalidRequest,
    **{
        kind.status: kind
        for kind in errors.RequestRefused.__subclasses__()
        if kind is not errors.Damaged
    },
}


@dataclass(frozen=True)
class Request(Generic[T]):
    """One HTTP request and how to read its answer."""

    method: str
    path: str
    """Below the server's root: ``/v1/jobs``, ``/status``."""
    parse: type[T] | Callable[[bytes], T]
    """A model that the answer is JSON of, or a function of the answer's bytes."""
    params: Mapping[str, Param] = field(default_factory=dict[str, Param])
    """None is left out; a sequence is repeated."""
    body: BaseModel | Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    hold: float = 0.0
    """Seconds that the server may keep the request open (long polls)."""
    patience: float | None = None
    """Seconds to keep retrying; None: the client's, and less for a server that never answered."""
    quick: bool = False
    """The server answers at once if it answers at all."""
    save: Path | None = None
    """File that receives the body of a successful answer."""

    def arguments(self, timeout: float) -> dict[str, Any]:
        """Keyword arguments for httpx' ``stream``."""
        content: str | None = None
        headers = dict(self.headers)
        if self.body is not None:
            headers["content-type"] = "application/json"
            if isinstance(self.body, BaseModel):
                try:
                    content = self.body.model_dump_json(exclude_unset=True, fallback=str)
                except PydanticSerializationError as error:
                    raise errors.ConfigError(
                        f"{self.method} {self.path}: got what JSON does not have in "
                        f"{unwritable(self.body)}"
                    ) from error
            else:
                content = json.dumps(self.body)
        whole = min(timeout, FIRST_ANSWER / 2) if self.quick else timeout + self.hold
        return {
            "method": self.method,
            "url": self.path,
            "params": {k: v for k, v in self.params.items() if v is not None},
            "headers": headers,
            "content": content,
            # A second attempt still fits before a server is taken for one that is not there.
            "timeout": httpx.Timeout(whole, connect=min(timeout, FIRST_ANSWER / 2)),
        }

    def result(self, response: httpx.Response, content: bytes) -> T:
        """The typed answer. Raises the server's refusal."""
        if not response.is_success:
            raise _refusal(response, content)
        try:
            return cast("Any", getattr(self.parse, "model_validate_json", self.parse))(content)
        except (ValidationError, ValueError, KeyError) as error:
            kind = response.headers.get("content-type", "")
            if not kind.startswith("application/json"):
                text = content[:1000].decode(errors="replace")
                words = foreign_answer(response.url, response.status_code, kind, text)
                raise errors.ArtError(words) from error
            raise errors.ArtError(
                f"{self.method} {response.url} was answered in a shape that this client does not "
                f"know. Use the same release of langchain-art on both sides.\n{error}"
            ) from error


Flow: TypeAlias = Generator[Request[Any], Any, T]


def _refusal(response: httpx.Response, content: bytes) -> errors.ArtError:
    if response.status_code in (502, 504):  # from a proxy, not from the server
        return errors.ServerUnreachable(f"{response.url}: HTTP {response.status_code} from a proxy")
    error: dict[str, Any] = {}
    try:
        error = json.loads(content)["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        content_type = response.headers.get("content-type")
        text = content[:1000].decode(errors="replace")
        message = foreign_answer(response.url, response.status_code, content_type, text)
    kind = errors.REFUSALS.get(str(error.get("code")))
    if kind is None:
        kind = _BY_STATUS.get(response.status_code, errors.RequestRefused)
    return kind(message, param=error.get("param"), retry_after=retry_after(response.headers))


def retry_after(headers: Mapping[Any, Any]) -> float | None:
    """Seconds to wait that an answer's headers ask for; None if they ask for nothing.

    Read are ``retry-after-ms`` and ``Retry-After`` (seconds or a date, RFC 9110 section 10.2.3).
    """
    known = {str(name).lower(): str(value) for name, value in headers.items()}
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            asked = float(known[name]) * unit
        except (KeyError, ValueError):
            continue
        if 0 <= asked < float("inf"):
            return asked
    try:
        until = parsedate_to_datetime(known["retry-after"])
    except (KeyError, ValueError):
        return None
    until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


class Backoff:
    """Pauses before retries, for `patience` seconds: Retry-After, or 0.2 s doubling to 5 s.

    A server that never answered is waited for ten seconds at most, unless the request itself says
    for how long.
    """

    def __init__(self, waiting: Waiting, patience: float, *, asked: bool = False) -> None:
        self._waiting = waiting
        self._begun = time.monotonic()
        self._patience = patience
        self._asked = asked
        self._pause = 0.2

    def after(self, failure: Exception) -> float:
        """Seconds to sleep after a retryable `failure`, with jitter. Raises it out of patience."""
        asked = failure.retry_after if isinstance(failure, errors.RequestRefused) else None
        pause = asked if asked is not None else self._pause * random.uniform(0.5, 1.0)
        self._pause = min(self._pause * 2, 5.0)
        passed = time.monotonic() - self._begun
        known = self._asked or self._waiting.answered
        patience = self._patience if known else min(self._patience, FIRST_ANSWER)
        left = patience - passed
        if left <= 0 or (asked is not None and asked > left):
            if isinstance(failure, httpx.TransportError):
                where = f"{self._waiting.base_url} in {passed:.0f} s"
                raise errors.ServerUnreachable(no_answer(where, reason(failure))) from None
            raise failure
        if isinstance(failure, httpx.TransportError) or passed + pause >= SILENCE:
            self._waiting.because(reason(failure))
        return min(max(pause, 0.01), left)


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
        raise errors.ConfigError(f"got the run {run!r:.200}, expected a run of capture() or its id")
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


def post_group(group: wire.TrajectoryGroup) -> Flow[int]:
    """Store a group, in parts if it is too large for one request; how many runs were new."""
    try:
        return (yield Request("POST", "/v1/groups", stored_of, body=group))
    except errors.BodyTooLarge:
        runs = group.trajectories
        if len(runs) == 1:
            raise
        stored, half = 0, len(runs) // 2
        for part in (runs[:half], runs[half:]):
            stored += yield from post_group(group.model_copy(update={"trajectories": part}))
        return stored


P = ParamSpec("P")
AnswerT = TypeVar("AnswerT", covariant=True)


@cache
def _tls(_file: str | None, _folder: str | None) -> ssl.SSLContext:
    """TLS context of all clients with these certificates: to read them takes 27 ms of CPU."""
    return httpx.create_ssl_context()


class Address(ABC):
    """Base of both clients: the server's address and key, and how long to retry."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 60.0,
        patience: float = 60.0,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        url = base_url or os.environ.get("ART_BASE_URL") or DEFAULT_BASE_URL
        self.base_url, self._root = split_base_url(url)
        self.api_key = api_key or os.environ.get("ART_API_KEY")
        self.timeout = timeout
        self.patience = patience
        self._waiting = Waiting(self.base_url, on_wait)
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Make the HTTP client."""

    @abstractmethod
    def _perform(self, made: Request[Any] | Flow[Any]) -> Any:
        """Send what an operation made, and give its answer or a coroutine of it."""

    def _options(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        tls = _tls(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        return {"base_url": self._root, "headers": headers, "verify": tls}

    def _backoff(self, request: Request[Any]) -> Backoff:
        if request.patience is None:
            return Backoff(self._waiting, self.patience)
        return Backoff(self._waiting, request.patience, asked=True)

    def _no_answer_yet(self, request: Request[Any]) -> tuple[float, Callable[[], None]]:
        """Seconds after which to speak of a request without an answer, and how."""
        words = f"no answer yet to {request.method} {request.path}"
        return SILENCE + request.hold, lambda: self._waiting.because(words)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"


class Endpoint(Protocol[P, AnswerT]):
    """An operation as a type checker sees it: a method of each of the two clients."""

    @overload
    def __get__(self, client: ArtClient, kind: Any, /) -> Callable[P, AnswerT]: ...
    @overload
    def __get__(
        self, client: AsyncArtClient, kind: Any, /
    ) -> Callable[P, Coroutine[Any, Any, AnswerT]]: ...
    @overload
    def __get__(self, client: None, kind: Any, /) -> Callable[Concatenate[Any, P], Any]: ...


def endpoint(make: Callable[Concatenate[Any, P], Request[T] | Flow[T]]) -> Endpoint[P, T]:
    """Let the client send what `make` makes, and return the answer or a coroutine of it."""

    @wraps(make)
    def method(client: Address, *args: P.args, **kwargs: P.kwargs) -> Any:
        made = make(client, *args, **kwargs)
        return client._perform(made)  # pyright: ignore[reportPrivateUsage]

    return cast("Endpoint[P, T]", method)
