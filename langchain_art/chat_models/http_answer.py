"""The answer to one HTTP request, parsed as it arrives by httptools (llhttp, Node.js's parser)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import httptools

from langchain_art.chat_models.http_pools import httpx

_Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class Answer:
    """A whole answer. The SDK's `response` is made when it is asked for, or where it must decode.

    Raises:
        httpx.DecodingError: the body is not `encoded` as its headers say.
    """

    status: int
    raw_headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    request: httpx.Request
    encoded: bool

    def __post_init__(self) -> None:
        if self.encoded:
            _ = self.response

    @property
    def is_success(self) -> bool:
        """True if it is neither a redirect nor an error."""
        return 200 <= self.status < 300

    @property
    def content(self) -> bytes:
        """The decoded body."""
        return self.response.content if self.encoded else self.body

    @cached_property
    def response(self) -> httpx.Response:
        """The answer as the SDK has it."""
        headers = httpx.Headers(self.raw_headers)
        return httpx.Response(self.status, headers=headers, content=self.body, request=self.request)


class AnswerParser:
    """Takes the bytes of one answer as they come; informational answers before it are dropped."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[_Header] = []
        self._parts: list[bytes] = []
        self._status: int | None = None
        self.is_complete = False
        self.keeps_connection = False
        """True if the connection may serve another request."""

    def feed(self, data: bytes) -> None:
        """Take what has arrived; nothing, if the connection was closed.

        Raises:
            ConnectionError: this is no HTTP, or the connection was closed before the answer's end.
        """
        if not data:
            self._close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.is_complete:
                raise ConnectionError(f"the answer is not HTTP: {error}") from error
            self.keeps_connection = False

    def _close(self) -> None:
        named = {name.lower() for name, _ in self._headers}
        if self._status is None or named & {b"content-length", b"transfer-encoding"}:
            raise ConnectionError("the server closed the connection within its answer")
        self.is_complete = True  # the end of the connection is the end of such an answer

    def answer(self, request: httpx.Request) -> Answer:
        """The complete answer to `request`; to be called once.

        Raises:
            httpx.DecodingError: the body is not encoded as the headers say.
        """
        assert self._status is not None
        del self._parser  # it refers to this object
        encoded = any(name.lower() == b"content-encoding" for name, _ in self._headers)
        return Answer(self._status, self._headers, b"".join(self._parts), request, encoded)

    def on_message_begin(self) -> None:
        """Callback of httptools, as all below."""
        if self.is_complete:  # data that belongs to no request
            self.keeps_connection = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, or a trailer."""
        if not self.is_complete:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Keep the status."""
        if not self.is_complete:
            self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body."""
        if not self.is_complete:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """Be complete, or begin anew after an informational answer."""
        if self.is_complete:
            return
        if self._status is not None and self._status < 200:
            self._headers, self._status = [], None
        else:
            self.is_complete, self.keeps_connection = True, self._parser.should_keep_alive()
