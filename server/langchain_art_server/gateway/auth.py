"""Access control: API key, loopback check, and the limit of a body's size."""

from __future__ import annotations

import logging
import secrets
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from langchain_art.errors import (
    ArtError,
    AuthenticationFailed,
    BodyTooLarge,
    ConfigError,
    InvalidRequest,
    RequestRefused,
)
from langchain_art_server.config import Settings, is_loopback

log = logging.getLogger(__name__)
OPEN_PATHS = {"/healthz", "/readyz"}


def answer(error: ArtError) -> JSONResponse:
    """The response to an error, in the form of OpenAI's API."""
    if isinstance(error, ConfigError):  # of what the request asks for
        error = InvalidRequest(str(error))
    if not isinstance(error, RequestRefused):
        return JSONResponse(RequestRefused(str(error)).body(), status_code=500)
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


@lru_cache(maxsize=256)
def _is_local(value: str) -> bool:
    """Whether a Host or Origin header names this machine."""
    host = urlsplit(value if "//" in value else f"//{value}").hostname
    return host is not None and is_loopback(host)


class AccessControl:
    """ASGI middleware that refuses requests without access, and bodies that are too large.

    With a key, every path but the health checks requires it (compared in constant time). Without
    one the server is on loopback, and web pages must not reach it: the Host header, and an Origin
    if there is one, must be a loopback name (against DNS rebinding and CSRF).
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._limit = settings.max_body_bytes
        key = settings.api_key.get_secret_value() if settings.api_key else None
        self._expected = f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            if scope["path"] not in OPEN_PATHS:
                self._admit(headers)
            length = headers.get(b"content-length", b"0")
            self._check_length(int(length) if length.isdigit() else 0)
            await self._app(scope, self._capped(receive), send)
        except ArtError as error:
            await answer(error)(scope, receive, send)
        except ClientDisconnect:
            log.debug("A client disconnected before it was answered.")

    def _admit(self, headers: dict[bytes, bytes]) -> None:
        if self._expected is not None:
            got = headers.get(b"authorization", b"")
            if not secrets.compare_digest(got, self._expected):
                raise AuthenticationFailed(
                    ("No API key was sent. " if not got else "The API key is wrong. ")
                    + "Send `Authorization: Bearer KEY`; clients read it from ART_API_KEY."
                )
            return
        for name in (b"host", b"origin"):
            value = headers.get(name, b"").decode("latin-1")
            if value and not _is_local(value):
                raise AuthenticationFailed(
                    f"got {name.decode()} {value!r}, expected a loopback name: this server has no "
                    "API key and answers this machine only. Set ART_API_KEY to let others in."
                )

    def _check_length(self, length: int) -> None:
        if length > self._limit:
            raise BodyTooLarge(
                f"got a body of {length} bytes or more, expected at most {self._limit}. Send fewer "
                "trajectories at a time, or raise max_body_bytes on the server."
            )

    def _capped(self, receive: Receive) -> Receive:
        seen = 0

        async def capped() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            self._check_length(seen)
            return message

        return capped
