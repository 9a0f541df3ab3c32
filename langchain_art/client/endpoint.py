"""Base of both clients: the server's address, and how a method is made of an operation."""

from __future__ import annotations

import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

import httpx

from langchain_art.client.http_request import SILENCE, Backoff, Flow, Request, Waiting
from langchain_art.wire.base_urls import DEFAULT_BASE_URL, split_base_url

if TYPE_CHECKING:
    from langchain_art.client.async_client import AsyncArtClient
    from langchain_art.client.sync_client import ArtClient

P = ParamSpec("P")
T = TypeVar("T")
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
