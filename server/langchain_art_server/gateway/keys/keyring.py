"""The keys in memory, by their hashes: to find one is one access of a dictionary.

A key has 256 random bits, so SHA-256 is a hash that cannot be turned back; one that is slow on
purpose is for passwords, which can be guessed. What is compared are hashes of what was sent, whose
bytes no caller can choose, so its time tells nothing of a key; the last comparison is in
constant time, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property

from langchain_art.errors import ArtError, AuthenticationFailed, InvalidRequest
from langchain_art.wire import ApiKey, KeySpec, NewApiKey
from langchain_art.wire.api_keys import (
    DEFAULT_TENANT,
    RUN_KEY,
    SCOPES,
    RunKey,
    key_mark,
    new_tenant_key,
)
from langchain_art_server.gateway.keys.scopes import ADMINISTRATOR
from langchain_art_server.gateway.limits import Clock, Meter
from langchain_art_server.storage.key_store import KeyStore, Stamp

log = logging.getLogger(__name__)
SERVERS_KEY = "ART_API_KEY"
#: Seconds between looks at the database: another process may have revoked a key.
REFRESH_SECONDS = 0.5
#: RFC 9110, 11.1: in any case.
_BEARER = b"bearer "
_RUN_KEY = RUN_KEY.encode()


@dataclass(eq=False, frozen=True)
class Access:
    """Access that a key gives."""

    id: str
    hash: bytes
    tenant: str
    scopes: frozenset[str]
    ends: float = math.inf
    """Seconds since the epoch from which on it is refused."""
    revoked: bool = False
    meter: Meter | None = None
    """None: it has no limits."""
    client: str | None = None
    """Client to whose share a request counts; None: the address that it comes from."""
    run: str | None = None
    """The run of which its calls are; None: they say it."""

    @cached_property
    def mark(self) -> str:
        """Its mark in the keys of runs that are made of it."""
        return key_mark(self.hash)

    def refusal(self) -> AuthenticationFailed:
        """The refusal of a key that has ended."""
        why = "was revoked" if self.revoked else "has expired"
        return AuthenticationFailed(
            f"The API key {self.id} {why}. Ask the server's administrator for a new one: "
            "langchain-art keys create"
        )


async def _nothing(_tenant: str) -> None: ...


@dataclass
class Keyring:
    """All keys of one server: those of `store`, if there is one, and ``ART_API_KEY``.

    That one's tenant is the default one, and it may do everything.
    """

    servers_key: InitVar[str]
    store: KeyStore | None = None
    clock: Clock = time.monotonic
    open_tenant: Callable[[str], Awaitable[None]] = _nothing
    """Callback before a key of a tenant is taken."""
    _by_hash: dict[bytes, Access] = field(default_factory=dict[bytes, Access])
    _stamp: Stamp | None = None
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self, servers_key: str) -> None:
        digest = hashlib.sha256(servers_key.encode()).digest()
        every = frozenset[str](SCOPES) | {ADMINISTRATOR}
        self._servers = Access(SERVERS_KEY, digest, DEFAULT_TENANT, every)
        self._by_hash[digest] = self._servers

    def find(self, authorization: bytes) -> Access | None:
        """The key of an Authorization header, if it is known; it may have ended."""
        if authorization[:7].lower() != _BEARER:
            return None
        if authorization.startswith(_RUN_KEY, 7):
            return self._of_run(RunKey.read(authorization[7:].decode("latin-1")))
        digest = hashlib.sha256(authorization[7:]).digest()
        access = self._by_hash.get(digest)
        if access is None or not secrets.compare_digest(access.hash, digest):
            return None
        return access

    def _of_run(self, key: RunKey | None) -> Access | None:
        """The access of a run's key: that of the key that it was made of, for calls alone."""
        if key is None:
            return None
        for access in self._by_hash.values():
            if access.mark == key.made_of and key.is_of(access.hash):
                scopes = access.scopes & {"infer"}
                ends = min(access.ends, float(key.ends))
                return replace(access, scopes=scopes, ends=ends, run=key.run)
        return None

    def of_hash(self, digest: bytes) -> Access | None:
        """The key of a session, as it is now."""
        return self._by_hash.get(digest)

    def valid(self) -> list[Access]:
        """The keys that are taken now."""
        now = time.time()
        return [one for one in self._by_hash.values() if one.ends > now]

    async def refresh(self) -> None:
        """Read the keys again if one was made or revoked, by whatever process.

        A key whose tenant cannot be opened is not taken; the log says why.
        """
        if self.store is None:
            return
        async with self._reading:
            if await self.store.stamp() == self._stamp:
                return
            stamp, known = await self.store.known()
            found, closed = {self._servers.hash: self._servers}, set[str]()
            for tenant in {key.tenant for _, key in known}:
                try:
                    await self.open_tenant(tenant)
                except (ArtError, OSError) as error:
                    closed.add(tenant)
                    log.error("The tenant %s cannot be opened: %s", tenant, error)
            for digest, key in known:
                if key.tenant not in closed:
                    found[digest] = self._access(digest, key)
            self._by_hash = found
            self._stamp = None if closed else stamp

    def _access(self, digest: bytes, key: ApiKey) -> Access:
        before = self._by_hash.get(digest)
        meter = before.meter if before is not None else None  # it has counted
        if before is None and any(dict(key.limits).values()):
            meter = Meter(key.limits, self.clock)
        scopes = frozenset[str](key.scopes)
        if key.tenant == DEFAULT_TENANT and "admin" in scopes:
            scopes |= {ADMINISTRATOR}
        return Access(
            id=key.id,
            hash=digest,
            tenant=key.tenant,
            scopes=scopes,
            ends=min(key.expires_at or math.inf, key.revoked_at or math.inf),
            revoked=key.revoked_at is not None,
            meter=meter,
            client=f"{key.tenant}/{key.id}",
        )

    async def make(self, spec: KeySpec, *, by: str | None) -> NewApiKey:
        """Make a key, which works when this returns. Raises InvalidRequest."""
        assert self.store is not None
        if spec.expires_at is not None and spec.expires_at <= time.time():
            raise InvalidRequest(
                f"got expires_at={spec.expires_at}, which is past, expected seconds since the "
                "epoch to come",
                param="expires_at",
            )
        await self.open_tenant(spec.tenant)
        key = new_tenant_key()
        made = await self.store.add(spec, hashlib.sha256(key.encode()).hexdigest(), by=by)
        await self.refresh()
        return NewApiKey(**dict(made), key=key)

    async def revoke(self, key_id: str, *, by: str | None) -> ApiKey:
        """Revoke a key, which is refused when this returns. Raises NotFound."""
        assert self.store is not None
        revoked = await self.store.revoke(key_id, by=by)
        await self.refresh()
        return revoked
