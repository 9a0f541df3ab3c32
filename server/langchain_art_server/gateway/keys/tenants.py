"""The tenants of a server: each one's service, and its view of the engines that all share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from starlette.types import ASGIApp

from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire.api_keys import DEFAULT_TENANT
from langchain_art_server.backends.base import (
    ChatDelta,
    ChatEngine,
    ChatReply,
    ChatRequest,
    ModelInfo,
    Sampler,
)
from langchain_art_server.config import Settings
from langchain_art_server.gateway.keys.keyring import REFRESH_SECONDS, Keyring
from langchain_art_server.storage.key_store import KeyStore
from langchain_art_server.storage.schema import take_turn

if TYPE_CHECKING:
    from langchain_art_server.gateway.service import Service

log = logging.getLogger(__name__)
#: Below the data directory: the directories of tenants.
FOLDER = "tenants"


def tenant_of(client: str) -> str:
    """The tenant of a client that slots are counted for (`Access.client`, or an address)."""
    tenant, slash, _ = client.partition("/")
    return tenant if slash else DEFAULT_TENANT


def schema_of(tenant: str) -> str:
    """PostgreSQL's schema of a tenant; no two tenants have the same."""
    return f"tenant_{tenant.replace('-', '_')}"


def url_of(database_url: str | None, tenant: str) -> str | None:
    """The database of a tenant: a schema of the server's, or in SQLite a file; None: as it is."""
    if database_url is None:
        return None
    whole = sa.make_url(database_url)
    if whole.get_backend_name() == "postgresql":
        given = whole.query.get("options", "")
        options = f"{given} -csearch_path={schema_of(tenant)}".strip()
        return whole.update_query_dict({"options": options}).render_as_string(False)
    file = Path(whole.database or "")
    beside = file.with_name(f"{file.stem}-{tenant}{file.suffix}")
    return whole.set(database=str(beside)).render_as_string(False)


def settings_of(settings: Settings, tenant: str) -> Settings:
    """The server's settings for one tenant: another directory and another database."""
    changes = {
        "data_dir": settings.data_dir / FOLDER / tenant,
        "database_url": url_of(settings.database_url, tenant),
        "policies": (),
    }
    return settings.model_copy(update=changes)


async def require_servers_key(store: KeyStore, keys: Keyring | None) -> None:
    """Raise ConfigError if others have keys, and this start would ask for none."""
    made = [one for one in await store.all() if one.revoked_at is None]
    if made and keys is None:
        raise ConfigError(
            f"The database has {len(made)} API keys that are not revoked ({made[0].id} …), and "
            "this server has none of its own, so it would ask nobody for a key. Set ART_API_KEY."
        )


@dataclass(frozen=True)
class TenantEngine:
    """A `ChatEngine` (see `backends.base`) as one tenant sees it; two of the same are equal."""

    engine: ChatEngine
    tenant: str

    @property
    def info(self) -> ModelInfo:
        """The engine's model."""
        return self.engine.info

    def chat(self, request: ChatRequest) -> AsyncGenerator[ChatDelta | ChatReply, None]:
        """Delegates to the engine's method."""
        adapter = None if request.adapter is None else f"{self.tenant}/{request.adapter}"
        run = request.run and f"{self.tenant}/{request.run}"
        return self.engine.chat(replace(request, adapter=adapter, run=run, tenant=self.tenant))


@dataclass(frozen=True)
class TenantSampler(TenantEngine):
    """A `Sampler` (see `backends.base`) as one tenant sees it.

    Its adapters have names of their own, and what is kept of its prompts (the prefix cache, the
    ids of earlier texts) no other tenant's call is answered from. All else is the sampler's.
    """

    engine: Sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @property
    def engines(self) -> tuple[TenantEngine, ...]:
        """Delegates to the sampler's method."""
        return tuple(TenantEngine(one, self.tenant) for one in self.engine.engines)

    async def start(self) -> None:
        """Nothing: it is started once, for all tenants."""

    async def close(self) -> None:
        """Nothing, as `start`."""

    async def load_adapter(self, name: str, path: Path, *, probe: bool = True) -> None:
        """Delegates to the sampler's method."""
        await self.engine.load_adapter(f"{self.tenant}/{name}", path, probe=probe)

    async def unload_adapter(self, name: str) -> None:
        """Delegates to the sampler's method."""
        await self.engine.unload_adapter(f"{self.tenant}/{name}")


class Tenants:
    """The services of all tenants; iterating gives them, the default one's first."""

    def __init__(self, main: Service) -> None:
        self._main = main
        self._services = {DEFAULT_TENANT: main}
        self._apps: dict[str, ASGIApp] = {}
        self._opening = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        #: Makes the application of a service.
        self.make_app: Callable[[Service], ASGIApp] | None = None

    def __iter__(self) -> Iterator[Service]:
        return iter(list(self._services.values()))

    def app_of(self, tenant: str) -> ASGIApp:
        """The application that answers a tenant's requests; made when it is first asked for."""
        app = self._apps.get(tenant)
        if app is None:
            assert self.make_app is not None
            app = self._apps[tenant] = self.make_app(self._services[tenant])
        return app

    def stored_bytes_of(self, tenant: str) -> int:
        """Bytes of its database and adapters, when they were last probed."""
        return self._services[tenant].stored_bytes

    async def start(self) -> None:
        """Open the tenants of all keys, and look for new keys from now on.

        Raises ConfigError: the database of one cannot be opened, or a policy of one has no usable
        version left.
        """
        if self._main.keys is not None:
            self._main.keys.open_tenant = self.open
            for tenant in {key.tenant for key in await self._main.store.keys.all()}:
                await self.open(tenant)
            await self._main.keys.refresh()
            self._task = asyncio.create_task(self._refresh_for_ever(self._main.keys))

    async def _refresh_for_ever(self, keys: Keyring) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await keys.refresh()
            except ArtError as error:  # the store does not answer; health says so
                log.warning("The API keys could not be read again: %s", error)
            except Exception:
                log.exception("The API keys could not be read again.")

    async def open(self, tenant: str) -> None:
        """Make or open a tenant's database, unless it is open. Raises as `start`."""
        async with self._opening:
            if tenant in self._services:
                return
            service = await asyncio.to_thread(self._make, tenant)
            try:
                await service.start()
                service.stored_bytes = await service.store.stored_bytes()
            except BaseException:
                await service.close()
                raise
            self._services[tenant] = service

    def _make(self, tenant: str) -> Service:
        main = self._main
        settings = settings_of(main.settings, tenant)
        engine = main.store.engine
        if engine.dialect.name == "postgresql":
            with engine.begin() as connection:
                if main.store.shared:
                    take_turn(connection)  # two servers at a time cannot make one
                connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {schema_of(tenant)}")
        sampler: Any = TenantSampler(main.sampler, tenant)
        return type(main)(settings, sampler, main.learner, tenant, main)

    async def measure(self) -> int:
        """Bytes of all databases and adapters."""
        for service in self:
            service.stored_bytes = await service.store.stored_bytes()
        return sum(service.stored_bytes for service in self)

    async def close(self) -> None:
        """Close all services but the main one."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for service in self:
            if service is not self._main:
                await service.close()
