"""`ArtClient`, the blocking client of the server's HTTP API; its async twin is in `async_client`.

Every call is idempotent, so it is retried after connection errors and 408, 429 or 503 answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from threading import Timer
from typing import TypeVar

import httpx

from langchain_art.client.endpoints import Endpoints
from langchain_art.client.http_request import RETRYABLE, Flow, Request
from langchain_art.errors import BodyTooLarge, NotFound

T = TypeVar("T")


def found_or_none(read: Callable[[str], T], id_: str) -> T | None:
    """The answer of a client's method to an id; None if the server has nothing of this id."""
    try:
        return read(id_)
    except NotFound:
        return None


class ArtClient(Endpoints):
    """A blocking client. May be shared between threads.

    Example::

        with ArtClient() as client:
            job = client.train(groups, "email-agent", key="batch-7")
            print(client.wait(job).version)

    Args:
        base_url: ends with ``/v1`` (added if it is missing), as ChatART's. None: the environment
            variable ART_BASE_URL, else ``http://localhost:8000/v1``.
        api_key: sent as a bearer token. None: the environment variable ART_API_KEY, else no key.
        timeout: seconds for one attempt, in addition to the time of a long poll.
        patience: seconds to keep retrying after connection errors and 408, 429 or 503 answers; for
            a server that never answered, ten at most.
        on_wait: gets the words while the client waits (``waiting for http://…: connection
            refused``), also from other threads. None: they are logged as warnings.

    Raises:
        ConfigError: `base_url` is not an http(s) URL.

    All methods raise `ServerUnreachable`, or the `RequestRefused` that the server answered with.
    """

    def _open(self) -> None:
        self._http = httpx.Client(**self._options())

    def __enter__(self) -> ArtClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _perform(self, made: Request[T] | Flow[T]) -> T:
        if isinstance(made, Request):
            return self._send(made)
        with closing(made):
            try:
                request = next(made)
                while True:
                    try:
                        answer = self._send(request)
                    except BodyTooLarge as error:
                        request = made.throw(error)
                    else:
                        request = made.send(answer)
            except StopIteration as stop:
                return stop.value

    def _send(self, request: Request[T]) -> T:
        backoff = self._backoff(request)
        while True:
            silence = Timer(*self._no_answer_yet(request))
            silence.daemon = True
            silence.start()
            try:
                with self._http.stream(**request.arguments(self.timeout)) as response:
                    silence.cancel()
                    self._waiting.answer(response.status_code)
                    content = b""
                    if request.save is not None and response.is_success:
                        with request.save.open("wb") as file:
                            for chunk in response.iter_bytes():
                                file.write(chunk)
                    else:
                        content = response.read()
                return request.result(response, content)
            except RETRYABLE as failure:
                silence.cancel()
                time.sleep(backoff.after(failure))
            finally:
                silence.cancel()
