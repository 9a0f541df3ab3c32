"""The door: who may come in, and how much they may bring."""

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
    """An error in OpenAI's shape."""
    if isinstance(error, ConfigError):  # what the body asks for makes no sense
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
    """Whether a Host or an Origin names this machine."""
    host = urlsplit(value if "//" in value else f"//{value}").hostname
    return host is not None and is_loopback(host)


class AccessControl:
    """Pure ASGI: who may come in, and how much they may bring.

    With a key, every path but the health checks asks for it (compared in constant time). Without
    one the server is on loopback, and a browser's page must not reach it: the Host header must be a
    loopback name and an Origin, if any, too (DNS rebinding, CSRF).
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._limit = settings.max_body_bytes
        key = settings.api_key.get_secret_value() if settings.api_key else None
        self._expected = f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it with the refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            if scope["path"] not in OPEN_PATHS:
                self._admit(headers)
            self._check_length(headers)
            await self._app(scope, self._capped(receive), send)
        except ArtError as error:
            await answer(error)(scope, receive, send)
        except ClientDisconnect:
            log.debug("A client left before it was answered.")

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

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limit:
            raise self._too_large(int(length))

    def _too_large(self, got: int) -> BodyTooLarge:
        return BodyTooLarge(
            f"got a body of {got} bytes or more, expected at most {self._limit}. Send fewer "
            "trajectories at a time, or raise max_body_bytes on the server."
        )

    def _capped(self, receive: Receive) -> Receive:
        seen = 0

        async def capped() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise self._too_large(seen)
            return message

        return capped
