"""Access control: who may ask, and in which form. Without a key: this machine's own programs."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from langchain_art.errors import ArtError, AuthenticationFailed, InvalidRequest, Overloaded
from langchain_art_server.config import Settings, is_loopback
from langchain_art_server.gateway.refusals import answer
from langchain_art_server.gateway.request_bodies import RequestBodies
from langchain_art_server.gateway.sessions import Sessions

log = logging.getLogger(__name__)
CHAT = "/v1/chat/completions"
OPEN_PATHS = {"/healthz", "/readyz"}
#: Wrong keys of a peer that are answered at once, seconds that each further one takes, how many of
#: them may wait, and seconds after the last one until the peer starts anew.
_AT_ONCE, _SLOW, _MAY_WAIT, _FORGET_AFTER = 8, 1.0, 32, 300.0
#: Seconds between two lines of the log about one peer, and peers that are remembered.
_LOG_EVERY, _MAX_PEERS = 10.0, 4096


@lru_cache(maxsize=256)
def _is_local(host_header: str) -> bool:
    """Whether a Host header names this machine."""
    try:
        host = urlsplit(f"//{host_header}").hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)


@lru_cache(maxsize=_MAX_PEERS)
def _network(address: str) -> str:
    """An IPv4 address, or the /64 of an IPv6 address: one host has all of its addresses."""
    if ":" not in address:
        return address
    try:
        return ipaddress.ip_address(address.partition("%")[0]).exploded[:19]
    except ValueError:
        return address


def peer_of(scope: Scope) -> str:
    """Whom limits of one client are counted for: the address that a request came from."""
    client = scope.get("client")
    return _network(client[0]) if client else ""


@dataclass
class _Peer:
    wrong: int = 0
    waiting: int = 0
    last: float = 0.0
    logged: float = float("-inf")


class WrongKeys:
    """Slows the answers to wrong keys, by peer, and logs them. A right key is never slowed."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    async def note(self, peer: str) -> None:
        """Count one, and return when it may be answered. Raises Overloaded if too many wait."""
        now = time.monotonic()
        one = self._peers.setdefault(peer, _Peer())
        self._peers.move_to_end(peer)
        if len(self._peers) > _MAX_PEERS:
            self._peers.popitem(last=False)
        if now - one.last > _FORGET_AFTER:
            one.wrong = 0
        one.wrong, one.last = one.wrong + 1, now
        if now - one.logged >= _LOG_EVERY:
            one.logged = now
            log.warning("A wrong API key from %s, the %d. of it.", peer or "?", one.wrong)
        if one.wrong <= _AT_ONCE:
            return
        if one.waiting >= _MAY_WAIT:
            raise Overloaded("Too many wrong API keys from here.", retry_after=_SLOW)
        one.waiting += 1
        try:
            await asyncio.sleep(_SLOW)
        finally:
            one.waiting -= 1


class AccessControl:
    """ASGI middleware that refuses requests without access, and bodies that are too large.

    With a key, every path but the health checks requires it (compared in constant time). Without
    one the server is on loopback, and web pages must not reach it: the Host header must be a
    loopback name (against DNS rebinding), an Origin the server's own (against CSRF). A body is JSON
    and says so, which a page of another origin cannot send unasked.

    `context`: of the model, in tokens; it bounds the body of a chat request. `sessions`: of
    browsers, where there is a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        context: int | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        self._app = app
        self._bodies = RequestBodies(settings.max_body_bytes, context)
        self._wrong = WrongKeys()
        key = settings.api_key.get_secret_value() if settings.api_key else None
        self._expected = f"Bearer {key}".encode() if key else None
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def begin(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            headers = dict(scope["headers"])
            if scope["path"] not in OPEN_PATHS and (wrong := self._no_access(scope, headers)):
                if headers.get(b"authorization"):
                    await self._wrong.note(peer_of(scope))
                raise wrong
            _check_form(scope, headers)
            chat = scope["path"] == CHAT
            with self._bodies.admit(headers, receive, peer_of(scope), chat=chat) as body:
                await self._app(scope, body.receive, begin)
        except ArtError as error:
            await answer(error)(scope, receive, send)
        except ClientDisconnect:
            log.debug("A client disconnected before it was answered.")
        except Exception as error:
            log.exception("%s %s failed.", scope["method"], scope["path"])
            if begun:
                raise  # the server's connection is closed: an answer cut short must not look whole
            await answer(error)(scope, receive, send)

    def _no_access(self, scope: Scope, headers: dict[bytes, bytes]) -> AuthenticationFailed | None:
        if self._expected is not None:
            got = headers.get(b"authorization", b"")
            if secrets.compare_digest(got, self._expected):
                return None
            if not got and self._sessions is not None:
                return self._sessions.refusal(scope, headers)
            return AuthenticationFailed(
                "The API key is wrong. Send `Authorization: Bearer KEY`; clients read it from "
                "ART_API_KEY."
            )
        host = headers.get(b"host", b"").decode("latin-1")
        if host and not _is_local(host):
            return AuthenticationFailed(
                f"got Host {host[:200]!r}, expected a loopback name: this server has no API key "
                "and answers this machine only. Set ART_API_KEY to let others in."
            )
        origin, own = headers.get(b"origin"), f"{scope['scheme']}://{host}"
        if origin is not None and origin.decode("latin-1").lower() != own.lower():
            return AuthenticationFailed(
                f"got Origin {origin[:200].decode('latin-1')!r}, expected {own!r}: this server has "
                "no API key and answers no other site's pages. Set ART_API_KEY to let others in."
            )
        return None


def _check_form(scope: Scope, headers: dict[bytes, bytes]) -> None:
    if "\0" in scope["path"] or b"%00" in scope["query_string"]:
        raise InvalidRequest("got a NUL (%00) in the URL, expected none: no id or name has one.")
    if headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers:
        got = headers.get(b"content-type", b"")
        if got != b"application/json" and (
            got.partition(b";")[0].strip().lower() != b"application/json"
        ):
            raise InvalidRequest(
                f"got Content-Type {got[:200].decode('latin-1')!r}, expected application/json",
                param="Content-Type",
            )
