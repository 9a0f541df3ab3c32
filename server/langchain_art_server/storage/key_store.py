"""API keys and the log of what was done with them, as the database keeps them."""

from __future__ import annotations

import time
import uuid
from typing import Any

import sqlalchemy as sa

from langchain_art.errors import NotFound
from langchain_art.wire import ApiKey, KeyLimits, KeySpec, LoggedAction
from langchain_art.wire.api_keys import DEFAULT_TENANT
from langchain_art_server.storage.database import Tables, reads, writes
from langchain_art_server.storage.queries import Page, take_page
from langchain_art_server.storage.seals import insert, intact, update
from langchain_art_server.storage.tables import ACTIONS, API_KEYS

#: Entries of the log that are kept of a tenant's keys, and of all administrators; and bytes of what
#: one says: together they bound what a tenant's log takes of the server's own database.
MAX_ENTRIES, MAX_SUBJECT = 10_000, 500
#: Rows and revocations: they differ whenever a key was made or revoked, by whatever process.
Stamp = tuple[int, int]


class KeyStore(Tables):
    """The keys of one server, of all tenants; see `Store.keys`."""

    @writes
    def add(
        self, connection: sa.Connection, spec: KeySpec, digest: str, *, by: str | None
    ) -> ApiKey:
        """Store a key by the SHA-256 of it, in hex, and who made it."""
        made = ApiKey(**dict(spec), id=f"key-{uuid.uuid4().hex[:16]}", created_at=time.time())
        row: dict[str, Any] = made.model_dump(exclude={"scopes", "limits"})
        row |= {"scopes": " ".join(made.scopes), "limits": made.limits.model_dump_json()}
        insert(connection, API_KEYS, [row | {"hash": digest}])
        _note(connection, made.tenant, by, "made_key", f"{made.id} {made.name}")
        return made

    @writes
    def revoke(self, connection: sa.Connection, key_id: str, *, by: str | None) -> ApiKey:
        """Revoke a key from now on. Idempotent. Raises NotFound."""
        mine = API_KEYS.c.id == key_id
        row = connection.execute(sa.select(API_KEYS).where(mine)).first()
        if row is None:
            raise NotFound(
                f"No key {key_id!r} is known here; `langchain-art keys list` shows them."
            )
        if row.revoked_at is None:
            update(connection, API_KEYS, mine, {"revoked_at": time.time()})
            _note(connection, row.tenant, by, "revoked_key", f"{row.id} {row.name}")
        return _key(connection.execute(sa.select(API_KEYS).where(mine)).one())

    async def all(self) -> list[ApiKey]:
        """Every key that was ever made, oldest first."""
        return [key for _, key in (await self.known())[1]]

    async def stamp(self) -> Stamp:
        """See `Stamp`."""
        return await self.read(_stamp)

    @reads
    def known(self, connection: sa.Connection) -> tuple[Stamp, list[tuple[bytes, ApiKey]]]:
        """Every key with the SHA-256 of it, and the stamp of them all."""
        stamp = _stamp(connection)
        rows = connection.execute(sa.select(API_KEYS).order_by(API_KEYS.c.number)).all()
        return stamp, [(bytes.fromhex(intact(API_KEYS, row).hash), _key(row)) for row in rows]

    async def note(self, tenant: str, key: str | None, action: str, subject: str) -> None:
        """Write an entry of the log, its subject cut at `MAX_SUBJECT`; the oldest one goes."""
        await self.write(lambda c: _note(c, tenant, key, action, subject))

    async def actions(self, limit: int, before: int | None = None) -> Page[LoggedAction]:
        """Some entries of the log, the newest first; `before` is the number of one."""
        query = sa.select(ACTIONS).order_by(ACTIONS.c.number.desc())
        if before is not None:
            query = query.where(ACTIONS.c.number < before)

        def item(row: sa.Row[Any]) -> tuple[LoggedAction, int]:
            entry = LoggedAction.model_validate(intact(ACTIONS, row), from_attributes=True)
            return entry, len(row.subject)

        return await self.read(lambda c: take_page(c, query, limit, "number", item))


def _stamp(connection: sa.Connection) -> Stamp:
    counts = sa.select(sa.func.count(), sa.func.count(API_KEYS.c.revoked_at))
    rows, revoked = connection.execute(counts).one()
    return rows, revoked


def _note(
    connection: sa.Connection, tenant: str, key: str | None, action: str, subject: str
) -> None:
    if len(whole := subject.encode()) > MAX_SUBJECT:
        subject = whole[: MAX_SUBJECT - len("…".encode())].decode(errors="ignore") + "…"
    row = {"at": time.time(), "tenant": tenant, "key": key, "action": action, "subject": subject}
    insert(connection, ACTIONS, [row])
    administers = (API_KEYS.c.tenant == DEFAULT_TENANT) & API_KEYS.c.scopes.contains("admin")
    tenants = sa.select(API_KEYS.c.id).where(~administers)
    if connection.scalar(tenants.where(API_KEYS.c.id == key)) is not None:
        mine = (ACTIONS.c.tenant == tenant) & ACTIONS.c.key.in_(tenants)
    else:
        mine = ACTIONS.c.key.is_(None) | ACTIONS.c.key.not_in(tenants)
    kept = sa.select(ACTIONS.c.number).where(mine).order_by(ACTIONS.c.number.desc())
    beyond = kept.offset(MAX_ENTRIES).limit(1).scalar_subquery()
    connection.execute(sa.delete(ACTIONS).where(mine & (ACTIONS.c.number <= beyond)))


def _key(row: sa.Row[Any]) -> ApiKey:
    intact(API_KEYS, row)
    plain = {
        name: getattr(row, name)
        for name in ("id", "name", "tenant", "created_at", "expires_at", "revoked_at")
    }
    limits = KeyLimits.model_validate_json(row.limits)
    return ApiKey(**plain, scopes=tuple(row.scopes.split()), limits=limits)
