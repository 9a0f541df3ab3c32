"""Browsers' sessions on a server that has a key: a cookie each, and a token beside it.

The cookie is HttpOnly and SameSite=Strict: no script reads it, and no other site's page sends it.
What changes something needs the session's token in a header as well, which only the server's own
page knows, and the Origin of that page. A session ends when its person logs out, with its time, or
with the server.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.requests import cookie_parser
from starlette.types import Scope

from langchain_art.errors import AuthenticationFailed
from langchain_art_server.gateway.keys.scopes import OPEN

#: Seconds until a person logs in again, and sessions of one key at once; one more ends its oldest.
SESSION_SECONDS, MAX_SESSIONS = 12 * 3600, 64
TOKEN_HEADER = b"x-art-token"
#: What a browser without a session may have: the page itself, and the way in and out.
_OPEN = OPEN - {("GET", path) for path in ("/healthz", "/readyz")}
FILES = "/page/static/"
_READS = {"GET", "HEAD"}


class _Session(NamedTuple):
    token: str
    ends: float
    key: bytes
    """The hash of the key that opened it."""


class Sessions:
    """The sessions of one server."""

    def __init__(self, key: str) -> None:
        self._open: dict[str, _Session] = {}
        # Cookies are of a host, not of a port: servers with different keys keep their own.
        name = hmac.new(key.encode(), b"art page name", hashlib.sha256).hexdigest()
        self.cookie = f"art_session_{name[:8]}"

    def new(self, key: bytes) -> str:
        """Open a session by a key, given by its hash; the value of its cookie."""
        now = time.monotonic()
        self._open = {name: one for name, one in self._open.items() if one.ends > now}
        mine = [name for name, one in self._open.items() if one.key == key]
        for oldest in mine[: max(0, len(mine) + 1 - MAX_SESSIONS)]:
            del self._open[oldest]
        value = secrets.token_urlsafe(32)
        self._open[value] = _Session(secrets.token_hex(32), now + SESSION_SECONDS, key)
        return value

    def end(self, headers: Mapping[bytes, bytes]) -> None:
        """End the session of a request, if it has one."""
        self._open.pop(self._value(headers), None)

    def token(self, headers: Mapping[bytes, bytes]) -> str | None:
        """The token of a request's session; None without a session that is open."""
        found = self._of(headers)
        return found.token if found is not None else None

    def key_of(self, scope: Scope, headers: Mapping[bytes, bytes]) -> bytes | None:
        """The hash of the key that opened a request's session; None if it needs no session.

        Raises AuthenticationFailed: it needs one and has none, or is another site's page's.
        """
        _require_own_origin(headers)
        method, path = scope["method"], scope["path"]
        if (method, path) in _OPEN or (method in _READS and path.startswith(FILES)):
            return None
        if (found := self._of(headers)) is None:
            raise AuthenticationFailed(
                "No API key was sent. Send `Authorization: Bearer KEY`; clients read it from "
                "ART_API_KEY. In a browser, log in at this server's address."
            )
        got = headers.get(TOKEN_HEADER, b"")
        if method not in _READS and not secrets.compare_digest(got, found.token.encode()):
            raise AuthenticationFailed(
                f"got {'a wrong' if got else 'no'} X-ART-Token, expected the session's, which "
                "GET /page/session answers: a session's cookie alone changes nothing."
            )
        return found.key

    def _of(self, headers: Mapping[bytes, bytes]) -> _Session | None:
        found = self._open.get(self._value(headers))
        return found if found is not None and found.ends > time.monotonic() else None

    def _value(self, headers: Mapping[bytes, bytes]) -> str:
        return cookie_parser(headers.get(b"cookie", b"").decode("latin-1")).get(self.cookie, "")


def _require_own_origin(headers: Mapping[bytes, bytes]) -> None:
    """Refuse another site's page. A proxy may have ended TLS, so the scheme is not compared."""
    if (origin := headers.get(b"origin")) is None:
        return
    host = headers.get(b"host", b"").decode("latin-1").lower()
    try:
        own = urlsplit(origin.decode("latin-1").lower()).netloc == host != ""
    except ValueError:
        own = False
    if not own:
        raise AuthenticationFailed(
            f"got Origin {origin[:200].decode('latin-1')!r}, expected that of Host {host[:200]!r}: "
            "a session is of this server's own page. Programs send `Authorization: Bearer KEY`."
        )
