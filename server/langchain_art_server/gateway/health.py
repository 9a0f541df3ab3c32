"""Health of the server: engines, database, disk; and what is stored."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from langchain_art.errors import EngineUnavailable, QuotaExceeded
from langchain_art_server.backends.base import Engine
from langchain_art_server.storage.store import Store

log = logging.getLogger(__name__)
#: Seconds between probes of the database and the disk, and until one counts as failed.
PROBE_SECONDS, PROBE_WITHIN = 5.0, 10.0
#: Times `min_free_bytes` from which on a little free space is warned of.
WARN_FROM = 4


class Health:
    """Problems of a server, by part. Engines report their own, the rest is probed."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        store: Store,
        data_dir: Path,
        max_stored_bytes: int,
        min_free_bytes: int,
        measure: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        self._engines, self._store, self._data_dir = engines, store, data_dir
        self._measure = measure or (lambda: store.stored_bytes())
        self._max_stored_bytes, self._min_free_bytes = max_stored_bytes, min_free_bytes
        #: Bytes, of the disk that has least, when they were last probed; None: not yet.
        self.free_bytes: int | None = None
        self._warned = False
        #: Of the database and the adapters, when they were last probed.
        self.stored_bytes = 0
        self._server: str | None = "is starting"
        self._probed: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def reasons(self) -> dict[str, str]:
        """Part -> why it does not work now; empty if all do."""
        if self._server is not None:
            return {"server": self._server}
        engines = {name: engine.problem for name, engine in self._engines.items()}
        return {name: why for name, why in engines.items() if why is not None} | self._probed

    @property
    def is_disk_full(self) -> bool:
        """True if nothing is to be added: so little space was free when it was last probed."""
        return self.free_bytes is not None and self.free_bytes < self._min_free_bytes

    def require_space(self) -> None:
        """Refuse what would add to the database or the adapters.

        Raises:
            QuotaExceeded: `max_stored_bytes` are stored.
            EngineUnavailable: the disk is nearly full.
        """
        if self.is_disk_full:
            raise EngineUnavailable(
                f"The server's disk has {self.free_bytes} bytes free, and its setting "
                f"min_free_bytes is {self._min_free_bytes}. Free disk space, then send the request "
                "again; nothing was stored.",
                retry_after=PROBE_SECONDS,
            )
        if self.stored_bytes >= self._max_stored_bytes:
            raise QuotaExceeded(
                f"The database and the adapters have {self.stored_bytes} bytes, and the server's "
                f"setting max_stored_bytes is {self._max_stored_bytes}. Delete runs or policies, "
                "or raise it."
            )

    def start(self) -> None:
        """Start to answer, if the server's parts do."""
        self._server = None
        self._task = asyncio.create_task(self._probe_for_ever())

    def drain(self) -> None:
        """Stop taking new requests."""
        self._server = "is shutting down: running requests end, new ones are refused"

    async def close(self) -> None:
        """Stop answering."""
        self._server = "is shutting down"
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _probe_for_ever(self) -> None:
        while True:
            probe = asyncio.create_task(self._probe())
            if not (await asyncio.wait({probe}, timeout=PROBE_WITHIN))[0]:
                self._probed = {"store": f"has not answered for {PROBE_WITHIN:g} s"}
                log.error("The store %s.", self._probed["store"])
            self._probed = await probe
            await asyncio.sleep(PROBE_SECONDS)

    async def _probe(self) -> dict[str, str]:
        found: dict[str, str] = {}
        try:
            self.free_bytes = await asyncio.to_thread(self._free)
            self._warn(self.free_bytes)
            if self.is_disk_full:
                expected = f"expected at least {self._min_free_bytes}"
                found["disk"] = f"has {self.free_bytes} bytes free, {expected}"
        except OSError as error:
            found["disk"] = "the data directory cannot be read; the log says why"
            log.error("The data directory cannot be read: %s", error)
        try:
            await self._store.probe()
            self.stored_bytes = await self._measure()
        except Exception as error:  # noqa: BLE001 - whatever it is, the store does not work
            found["store"] = "cannot be written to or read; the log says why"
            log.error("The store was probed: %s", error)
        return found

    def _free(self) -> int:
        """Bytes that are free for the database (of SQLite) and the adapters."""
        places = {self._data_dir}
        if self._store.engine.dialect.name == "sqlite":
            places.add(Path(self._store.engine.url.database or "").absolute().parent)
        return min(shutil.disk_usage(place).free for place in places)

    def _warn(self, free: int) -> None:
        """Say once that there is little space, and once that there is enough again."""
        is_little = free < WARN_FROM * self._min_free_bytes
        if is_little and not self._warned:
            log.warning(
                "The disk has %d bytes free. With fewer than %d (min_free_bytes), jobs wait and "
                "calls, runs, policies and jobs are refused.",
                *(free, self._min_free_bytes),
            )
        elif self._warned and not is_little:
            log.info("The disk has %d bytes free again.", free)
        self._warned = is_little
