"""Whether calls are answered now, and if not, why: engines, database, disk; and what is stored."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from langchain_art.errors import QuotaExceeded
from langchain_art_server.backends.base import Engine
from langchain_art_server.storage.store import Store

log = logging.getLogger(__name__)
#: Seconds between probes of the database and the disk, and until one counts as failed.
PROBE_SECONDS, PROBE_WITHIN = 5.0, 10.0
#: Below this, neither the database's log nor an adapter can be relied on to be written.
MIN_FREE_BYTES = 16 << 20


class Health:
    """What keeps a server from answering, by part. Engines tell themselves, the rest is probed.

    The reasons are for anyone to read (``/readyz`` needs no key); the log has the details.
    `measure` gives the bytes of all databases and adapters; None: those of `store`.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        store: Store,
        data_dir: Path,
        max_stored_bytes: int,
        measure: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        self._engines, self._store, self._data_dir = engines, store, data_dir
        self._measure = measure or (lambda: store.stored_bytes())
        self._max_stored_bytes = max_stored_bytes
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

    def require_space(self) -> None:
        """Refuse what would add to the database or the adapters. Raises QuotaExceeded."""
        if self.stored_bytes >= self._max_stored_bytes:
            raise QuotaExceeded(
                f"The database and the adapters have {self.stored_bytes} bytes, and the server's "
                f"setting max_stored_bytes is {self._max_stored_bytes}. Delete runs or policies, "
                "or raise it."
            )

    def start(self) -> None:
        """From now on the server answers, if its parts do."""
        self._server = None
        self._task = asyncio.create_task(self._probe_for_ever())

    async def close(self) -> None:
        """From now on it does not."""
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
            free = (await asyncio.to_thread(shutil.disk_usage, self._data_dir)).free
            if free < MIN_FREE_BYTES:
                found["disk"] = f"has {free} bytes free, expected at least {MIN_FREE_BYTES}"
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
