"""Access control: who may ask, and in which form. Without a key: this machine's own programs."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from langchain_art.errors import (
    ArtError,
    AuthenticationFailed,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
)
from langchain_art.wire.api_keys import DEFAULT_TENANT, RunKey
from langchain_art_server.config import Settings, is_loopback
from langchain_art_server.gateway.keys.keyring import Access, Keyring
from langchain_art_server.gateway.keys.scopes import ADMINISTRATOR, Rule, is_path, rule_of
from langchain_art_server.gateway.refusals import answer, no_such_path
from langchain_art_server.gateway.request_bodies import RequestBodies
from langchain_art_server.gateway.sessions import FILES, Sessions
from langchain_art_server.telemetry.log_context import CURRENT

log = logging.getLogger(__name__)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
#: The routes of model calls (`chat.completions.DIALECTS`).
CALLS = frozenset({CHAT, RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens"})
OPEN_PATHS = {"/healthz", "/readyz"}
#: Wrong keys of a peer that are answered at once, seconds that each further one takes, how many of
#: them may wait, and seconds after the last one until the peer starts anew.
_AT_ONCE, _SLOW, _MAY_WAIT, _FORGET_AFTER = 8, 1.0, 32, 300.0
#: Requests of a client that are served at once, beside those that wait (`Rule.waits`): each has a
#: thread, or a turn at the database, for which others' calls would wait.
AT_ONCE = 16
#: Seconds between two lines of the log about one peer, and peers that are remembered.
_LOG_EVERY, _MAX_PEERS = 10.0, 4096


@lru_cache(maxsize=256)
def _is_local(host_header: str) -> bool:
    """True if a Host header names this machine."""
    try:
        host = urlsplit(f"//{host_header}").hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)


@lru_cache(maxsize=_MAX_PEERS)
def network_of(address: str) -> str:
    """An IPv4 address, or the /64 of an IPv6 address: one host has all of its addresses."""
    if ":" not in address:
        return address
    try:
        return ipaddress.ip_address(address.partition("%")[0]).exploded[:19]
    except ValueError:
        return address


def access_of(scope: Scope) -> Access | None:
    """Access by the request's key; None: it has none, and the server asks for none."""
    return scope.get("art.access")


def peer_of(scope: Scope) -> str:
    """Client to whose share a request counts.

    The key that the request came with; of the server's own, and without one: the address.
    """
    if (access := access_of(scope)) is not None and access.client is not None:
        return access.client
    client = scope.get("client")
    return network_of(client[0]) if client else ""


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

    With a key, every path but the health checks requires one, with a scope of the route's
    (`keys.scopes`), and the application of its tenant answers. Without one the server is on
    loopback, and web pages must not reach it: the Host header must be a loopback name (against DNS
    rebinding), an Origin the server's own (against CSRF). A body is JSON and says so, which a page
    of another origin cannot send unasked.

    `app_of` and `stored_bytes` are a tenant's, by its name; `context`, in tokens, bounds the body
    of a chat request; without `keys` the server has no key.
    """

    def __init__(
        self,
        app_of: Callable[[str], ASGIApp],
        settings: Settings,
        context: int | None = None,
        keys: Keyring | None = None,
        sessions: Sessions | None = None,
        stored_bytes: Callable[[str], int] = lambda _tenant: 0,
    ) -> None:
        self._app_of = app_of
        self._bodies = RequestBodies(settings.max_body_bytes, context)
        self._wrong = WrongKeys()
        self._at_once = WeakValueDictionary[str, asyncio.Semaphore]()
        self._keys, self._sessions, self._stored_bytes = keys, sessions, stored_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app_of(DEFAULT_TENANT)(scope, receive, send)
            return
        begun, meter = False, None
        path: str = scope["path"]

        async def begin(message: Message) -> None:
            nonlocal begun
            begun = True
            if meter is not None and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *meter.headers()]
            await send(message)

        try:
            headers = dict(scope["headers"])
            if (key := headers.get(b"x-api-key")) and b"authorization" not in headers:
                headers[b"authorization"] = b"Bearer " + key  # Anthropic's clients send it so
            tenant, chat, rule = DEFAULT_TENANT, path in CALLS, rule_of(scope["method"], path)
            if path not in OPEN_PATHS and (access := await self._access(scope, headers)):
                tenant, meter = access.tenant, access.meter if chat else None
                self._check_scope(scope, access, rule)
            _check_form(scope, headers)
            peer = peer_of(scope)
            with self._bodies.admit(headers, receive, peer, chat=chat) as body:
                if path in OPEN_PATHS or (rule is not None and rule.waits):
                    await self._app_of(tenant)(scope, body.receive, begin)
                    return
                async with self._at_once.setdefault(peer, asyncio.Semaphore(AT_ONCE)):
                    await self._app_of(tenant)(scope, body.receive, begin)
        except ArtError as error:
            await answer(error, path)(scope, receive, begin)
        except ClientDisconnect:
            log.debug("A client disconnected before it was answered.")
        except Exception as error:
            log.exception("%s %s failed.", scope["method"], path)
            if begun:
                raise  # the server's connection is closed: an answer cut short must not look whole
            await answer(error, path)(scope, receive, send)

    async def _access(self, scope: Scope, headers: dict[bytes, bytes]) -> Access | None:
        """Access by a request's key or session; None: it needs none.

        Raises AuthenticationFailed: it needs one. Wrong keys are answered slowly.
        """
        try:
            access = self._find(scope, headers)
        except AuthenticationFailed:
            if headers.get(b"authorization"):
                await self._wrong.note(peer_of(scope))
            raise
        scope["art.access"] = access
        if (context := CURRENT.get()) is not None:
            context.tenant = access.tenant if access is not None else DEFAULT_TENANT
            context.key = access.id if access is not None else None
        return access

    def _find(self, scope: Scope, headers: dict[bytes, bytes]) -> Access | None:
        got = headers.get(b"authorization", b"")
        if self._keys is None:
            _require_this_machine(scope, headers)
            if key := RunKey.read(got[7:].decode("latin-1")):
                _name_run(scope, key.run)
            return None
        if got:
            access = self._keys.find(got)
        elif self._sessions is None:
            access = None
        elif (digest := self._sessions.key_of(scope, headers)) is None:
            return None  # what a browser may have that is not logged in
        else:
            access = self._keys.of_hash(digest)
        if access is None:
            raise AuthenticationFailed(
                "The API key is wrong. Send `Authorization: Bearer KEY`; clients read it from "
                "ART_API_KEY."
            )
        if access.ends <= time.time():
            raise access.refusal()
        if access.run is not None:
            _name_run(scope, access.run)
        return access

    def _check_scope(self, scope: Scope, access: Access, rule: Rule | None) -> None:
        """Raises PermissionDenied, QuotaExceeded, or NotFound: there is no such route."""
        method, path = scope["method"], scope["path"]
        if rule is None:
            if not path.startswith(FILES) and not is_path(path):
                raise no_such_path(method, path)
            return
        if rule.allowed.isdisjoint(access.scopes):
            if ADMINISTRATOR in rule.allowed:
                raise PermissionDenied(
                    "Only the server's administrator may do this: with ART_API_KEY, or a key of "
                    f"the tenant {DEFAULT_TENANT!r} that has the scope 'admin'."
                )
            raise PermissionDenied(
                f"The key {access.id} has the scopes {sorted(access.scopes)}, and {method} "
                f"{path:.200} needs one of {sorted(rule.allowed)}. Ask the server's administrator "
                "for a key with one of them."
            )
        if rule.stores and access.meter is not None:
            access.meter.require_space(self._stored_bytes(access.tenant))


def _name_run(scope: Scope, run: str) -> None:
    """The run of a request is that of its key. Raises InvalidRequest: its URL names another."""
    if scope.setdefault("art.run", run) != run:
        raise InvalidRequest(
            f"got the run {scope['art.run']!r:.200} in the URL and {run!r:.200} in the key, "
            "expected one of them alone"
        )


def _require_this_machine(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """Refuse what a server without a key does not answer. Raises AuthenticationFailed."""
    host = headers.get(b"host", b"").decode("latin-1")
    if host and not _is_local(host):
        raise AuthenticationFailed(
            f"got Host {host[:200]!r}, expected a loopback name: this server has no API key "
            "and answers this machine only. Set ART_API_KEY to let others in."
        )
    origin, own = headers.get(b"origin"), f"{scope['scheme']}://{host}"
    if origin is not None and origin.decode("latin-1").lower() != own.lower():
        raise AuthenticationFailed(
            f"got Origin {origin[:200].decode('latin-1')!r}, expected {own!r}: this server has "
            "no API key and answers no other site's pages. Set ART_API_KEY to let others in."
        )


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
