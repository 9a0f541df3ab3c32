"""One HTTP request as a value: its arguments, its answer, when to retry it. No I/O."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from langchain_art.client.waiting import FIRST_ANSWER, SILENCE, Waiting, reason
from langchain_art.errors import (
    REFUSALS,
    ArtError,
    AuthenticationFailed,
    ConfigError,
    Damaged,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    RequestRefused,
    RequestTimeout,
    ServerUnreachable,
)
from langchain_art.wire.base_urls import foreign_answer, no_answer
from langchain_art.wire.identifiers import unwritable

T = TypeVar("T")
Param: TypeAlias = "str | float | Sequence[str] | None"

#: Failures after which the same request may be sent again.
RETRYABLE = (
    httpx.TransportError,
    ServerUnreachable,
    Overloaded,
    EngineUnavailable,
    RequestTimeout,
)
_BY_STATUS: dict[int, type[RequestRefused]] = {
    403: AuthenticationFailed,
    422: InvalidRequest,
    **{kind.status: kind for kind in RequestRefused.__subclasses__() if kind is not Damaged},
}


@dataclass(frozen=True)
class Request(Generic[T]):
    """One HTTP request and how to read its answer."""

    method: str
    path: str
    """Below the server's root: ``/v1/jobs``, ``/status``."""
    parse: Callable[[bytes], T]
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
                    raise ConfigError(
                        f"{self.method} {self.path}: got what JSON does not have in "
                        f"{unwritable(self.body)}"
                    ) from error
            else:
                content = json.dumps(self.body)
        return {
            "method": self.method,
            "url": self.path,
            "params": {k: v for k, v in self.params.items() if v is not None},
            "headers": headers,
            "content": content,
            "timeout": self._timeout(timeout),
        }

    def _timeout(self, timeout: float) -> httpx.Timeout:
        whole = min(timeout, FIRST_ANSWER / 2) if self.quick else timeout + self.hold
        # A second attempt still fits before a server is taken for one that is not there.
        return httpx.Timeout(whole, connect=min(timeout, FIRST_ANSWER / 2))

    def result(self, response: httpx.Response, content: bytes) -> T:
        """The typed answer. Raises the server's refusal."""
        if not response.is_success:
            raise _refusal(response, content)
        try:
            return self.parse(content)
        except (ValidationError, ValueError, KeyError) as error:
            kind = response.headers.get("content-type", "")
            if not kind.startswith("application/json"):
                text = content[:1000].decode(errors="replace")
                words = foreign_answer(response.url, response.status_code, kind, text)
                raise ArtError(words) from error
            raise ArtError(
                f"{self.method} {response.url} was answered in a shape that this client does not "
                f"know. Use the same release of langchain-art on both sides.\n{error}"
            ) from error


Flow: TypeAlias = Generator[Request[Any], Any, T]


def _refusal(response: httpx.Response, content: bytes) -> ArtError:
    if response.status_code in (502, 504):  # from a proxy, not from the server
        return ServerUnreachable(f"{response.url}: HTTP {response.status_code} from a proxy")
    error: dict[str, Any] = {}
    try:
        error = json.loads(content)["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        content_type = response.headers.get("content-type")
        text = content[:1000].decode(errors="replace")
        message = foreign_answer(response.url, response.status_code, content_type, text)
    kind = REFUSALS.get(str(error.get("code")))
    if kind is None:
        kind = _BY_STATUS.get(response.status_code, RequestRefused)
    return kind(message, param=error.get("param"), retry_after=_seconds(response))


def _seconds(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):  # absent, or a date: the backoff is used
        return None


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
        asked = failure.retry_after if isinstance(failure, RequestRefused) else None
        pause = asked if asked is not None else self._pause * random.uniform(0.5, 1.0)
        self._pause = min(self._pause * 2, 5.0)
        passed = time.monotonic() - self._begun
        known = self._asked or self._waiting.answered
        patience = self._patience if known else min(self._patience, FIRST_ANSWER)
        left = patience - passed
        if left <= 0 or (asked is not None and asked > left):
            if isinstance(failure, httpx.TransportError):
                where = f"{self._waiting.base_url} in {passed:.0f} s"
                raise ServerUnreachable(no_answer(where, reason(failure))) from None
            raise failure
        if isinstance(failure, httpx.TransportError) or passed + pause >= SILENCE:
            self._waiting.because(reason(failure))
        return min(max(pause, 0.01), left)
