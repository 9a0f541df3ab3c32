"""One HTTP request as a value: its arguments, its answer, when to retry it. No I/O."""

from __future__ import annotations

import json
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from langchain_art.errors import (
    REFUSALS,
    ArtError,
    AuthenticationFailed,
    BodyTooLarge,
    ConfigError,
    Conflict,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestRefused,
    ServerUnreachable,
)

T = TypeVar("T")
Param: TypeAlias = "str | float | Sequence[str] | None"

#: Failures after which the same request may be sent again.
RETRYABLE = (ServerUnreachable, Overloaded, EngineUnavailable)
DEFAULT_BASE_URL = "http://localhost:8000/v1"
_BY_STATUS: dict[int, type[RequestRefused]] = {
    400: InvalidRequest,
    401: AuthenticationFailed,
    403: AuthenticationFailed,
    404: NotFound,
    409: Conflict,
    413: BodyTooLarge,
    422: InvalidRequest,
    429: Overloaded,
    503: EngineUnavailable,
}


@dataclass(frozen=True)
class Request(Generic[T]):
    """One HTTP request and how to read its answer."""

    method: str
    path: str
    """Below the server's root: ``/v1/jobs``, ``/status``."""
    parse: Callable[[bytes], T]
    body: BaseModel | Mapping[str, Any] | None = None
    params: Mapping[str, Param] = field(default_factory=dict[str, Param])
    """None is left out; a sequence is repeated."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    hold: float = 0.0
    """Seconds that the server may keep the request open (long polls)."""
    patience: float | None = None
    """Seconds to keep retrying; None: the client's."""
    save: Path | None = None
    """File that receives the body of a successful answer."""

    def arguments(self, timeout: float) -> dict[str, Any]:
        """Keyword arguments for httpx' ``stream``."""
        content: str | None = None
        headers = dict(self.headers)
        if self.body is not None:
            headers["content-type"] = "application/json"
            if isinstance(self.body, BaseModel):
                content = self.body.model_dump_json(exclude_unset=True, fallback=str)
            else:
                content = json.dumps(self.body)
        return {
            "method": self.method,
            "url": self.path,
            "params": {k: v for k, v in self.params.items() if v is not None},
            "headers": headers,
            "content": content,
            "timeout": httpx.Timeout(timeout + self.hold, connect=min(timeout, 10.0)),
        }

    def result(self, response: httpx.Response, content: bytes) -> T:
        """The typed answer. Raises the server's refusal."""
        if not response.is_success:
            raise _refusal(response, content)
        try:
            return self.parse(content)
        except (ValidationError, ValueError, KeyError) as error:
            raise ArtError(
                f"{self.method} {response.url} was answered in a shape that this client does not "
                f"know. Use the same release of langchain-art on both sides.\n{error}"
            ) from error


Flow: TypeAlias = Generator[Request[Any], Any, T]


def unreachable(base_url: str, error: httpx.TransportError) -> ServerUnreachable:
    """The error for a connection that gave no answer."""
    return ServerUnreachable(
        f"No answer from {base_url} ({type(error).__name__}: {error}). Start a server with "
        "`langchain-art serve MODEL`, or point base_url (or ART_BASE_URL) at one that runs."
    )


def _refusal(response: httpx.Response, content: bytes) -> ArtError:
    if response.status_code in (502, 504):  # from a proxy, not from the server
        return ServerUnreachable(f"{response.url}: HTTP {response.status_code} from a proxy")
    error: dict[str, Any] = {}
    try:
        error = json.loads(content)["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        excerpt = content[:300].decode(errors="replace").strip()
        message = f"{response.url}: HTTP {response.status_code} {excerpt}".strip()
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
    """Pause before a retry: Retry-After, or 0.2 s doubling to 5 s, with jitter.

    Args:
        patience: seconds after which the last failure is raised.
    """

    def __init__(self, patience: float) -> None:
        self._deadline = time.monotonic() + patience
        self._pause = 0.2

    def after(self, failure: ArtError) -> float:
        """Seconds to sleep after a retryable `failure`. Raises it when patience has run out."""
        asked = failure.retry_after if isinstance(failure, RequestRefused) else None
        pause = asked if asked is not None else self._pause * random.uniform(0.5, 1.0)
        self._pause = min(self._pause * 2, 5.0)
        left = self._deadline - time.monotonic()
        if left <= 0 or (asked is not None and asked > left):
            raise failure
        return min(max(pause, 0.01), left)


def split_base_url(base_url: str) -> tuple[str, str]:
    """Return ``(base_url ending with /v1, the server's root)``.

    Raises:
        ConfigError: it is not an http(s) URL.
    """
    trimmed = base_url.rstrip("/")
    if not trimmed.startswith(("http://", "https://")):
        raise ConfigError(
            f"base_url: got {base_url!r}, expected a URL such as {DEFAULT_BASE_URL!r}"
        )
    root = trimmed.removesuffix("/v1")
    return f"{root}/v1", root


class Address(ABC):
    """Base of both clients: the server's address and key, and how long to retry."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 60.0,
        patience: float = 60.0,
    ) -> None:
        url = base_url or os.environ.get("ART_BASE_URL") or DEFAULT_BASE_URL
        self.base_url, self._root = split_base_url(url)
        self.api_key = api_key or os.environ.get("ART_API_KEY")
        self.timeout = timeout
        self.patience = patience
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Make the HTTP client."""

    def _options(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"base_url": self._root, "headers": headers}

    def _backoff(self, request: Request[Any]) -> Backoff:
        return Backoff(self.patience if request.patience is None else request.patience)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"
