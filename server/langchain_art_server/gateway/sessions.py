"""A browser's session on a server that has a key: a signed cookie, and a token beside it.

The cookie is HttpOnly and SameSite=Strict: no script reads it, and no other site's page sends it.
What changes something needs the session's token in a header as well, which only the server's own
page knows, and the Origin of that page. Nothing is stored: the signature is of the key, so a
session outlives a restart of the server, and ends with its time or when the key is changed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.types import Scope

from langchain_art.errors import AuthenticationFailed

#: Seconds until a person logs in again.
SESSION_SECONDS = 12 * 3600
TOKEN_HEADER = b"x-art-token"
#: What a browser without a session may have: the page itself, and the way in and out.
_OPEN = {("GET", "/"), ("GET", "/page/session"), ("POST", "/page/login"), ("POST", "/page/logout")}
_FILES = "/page/static/"
_READS = {"GET", "HEAD"}


class Sessions:
    """The sessions of one key."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        # Cookies are of a host, not of a port: servers with different keys keep their own.
        self.cookie = f"art_session_{self._sign('name')[:8]}"

    def is_key(self, key: str) -> bool:
        """Whether this is the key, in constant time."""
        return secrets.compare_digest(key.encode(), self._key)

    def new(self) -> str:
        """The value of the cookie of a new session."""
        named = f"{int(time.time()) + SESSION_SECONDS}.{secrets.token_urlsafe(16)}"
        return f"{named}.{self._sign(f'session {named}')}"

    def token(self, headers: Mapping[bytes, bytes]) -> str | None:
        """The token of a request's session; None without a session that holds."""
        sent = headers.get(b"cookie", b"").decode("latin-1")
        try:
            morsel = SimpleCookie(sent).get(self.cookie)
        except CookieError:
            return None
        named, _, signature = (morsel.value if morsel else "").rpartition(".")
        expected = self._sign(f"session {named}")
        if not secrets.compare_digest(signature.encode("latin-1", "replace"), expected.encode()):
            return None
        return self._sign(f"token {named}") if int(named.partition(".")[0]) > time.time() else None

    def refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> AuthenticationFailed | None:
        """Why a request without an Authorization header is refused; None if it is not."""
        method, path = scope["method"], scope["path"]
        if (wrong := _other_origin(headers)) is not None:
            return wrong
        if (method, path) in _OPEN or (method in _READS and path.startswith(_FILES)):
            return None
        if (token := self.token(headers)) is None:
            return AuthenticationFailed(
                "No API key was sent. Send `Authorization: Bearer KEY`; clients read it from "
                "ART_API_KEY. In a browser, log in at this server's address."
            )
        got = headers.get(TOKEN_HEADER, b"")
        if method not in _READS and not secrets.compare_digest(got, token.encode()):
            return AuthenticationFailed(
                f"got {'a wrong' if got else 'no'} X-ART-Token, expected the session's, which "
                "GET /page/session answers: a session's cookie alone changes nothing."
            )
        return None

    def _sign(self, what: str) -> str:
        return hmac.new(self._key, f"art page {what}".encode(), hashlib.sha256).hexdigest()


def _other_origin(headers: Mapping[bytes, bytes]) -> AuthenticationFailed | None:
    """Refuse another site's page. A proxy may have ended TLS, so the scheme is not compared."""
    if (origin := headers.get(b"origin")) is None:
        return None
    host = headers.get(b"host", b"").decode("latin-1").lower()
    try:
        own = urlsplit(origin.decode("latin-1").lower()).netloc == host != ""
    except ValueError:
        own = False
    if own:
        return None
    return AuthenticationFailed(
        f"got Origin {origin[:200].decode('latin-1')!r}, expected that of Host {host[:200]!r}: a "
        "session is of this server's own page. Programs send `Authorization: Bearer KEY`."
    )
