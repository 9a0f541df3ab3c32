"""Deletes versions: those beyond `keep_checkpoints`, and those that somebody wants deleted.

A version is announced, then its row is deleted, then its files: a crash, or a disk that fails, in
between leaves an announcement, by which the rest is done later (`go_on`).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from langchain_art.errors import Conflict, Damaged, InvalidRequest
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.policies.router import Router
from langchain_art_server.storage.store import Store

log = logging.getLogger(__name__)


class Retention:
    """Deletes versions of one tenant's policies; keeps the newest `keep` of those not needed."""

    def __init__(self, store: Store, adapters: AdapterStore, router: Router, keep: int) -> None:
        self._store, self._adapters, self._router, self._keep = store, adapters, router, keep
        self._lock = asyncio.Lock()

    async def retain(self, policy: str, reference: int) -> None:
        """Delete the oldest versions of a policy beyond `keep`, but for those that are needed.

        Nor is `reference`, which the last step measured from: the next one of a fit does, too.
        """
        await self.go_on(policy)
        unneeded = await self._store.unneeded_versions(policy)
        free = [version for version in unneeded if version != reference]
        for version in free[: max(0, len(free) - self._keep)]:
            try:
                await self.drop(policy, version)
            except (InvalidRequest, Conflict) as busy:  # the next step tries again
                log.info("%s", busy)

    async def drop(self, policy: str, version: int) -> None:
        """Unload a version, then delete its row, then its files.

        Raises:
            InvalidRequest: calls use it.
            Conflict: it is needed (`Store.forget_checkpoint`).
        """
        async with self._lock:
            await self._router.forget(policy, version)
            await self._adapters.off_loop(self._adapters.announce, policy, version)
            await self._store.forget_checkpoint(policy, version)
            await self._adapters.off_loop(self._adapters.delete, policy, version)
            with suppress(InvalidRequest):  # a call that came meanwhile has loaded it again
                await self._router.forget(policy, version)

    async def sweep(self, policy: str, target: int) -> None:
        """Delete the files of versions that no row names, but for `target`, which a job makes.

        A server that lost its lease of the policy has left them (`storage.fleet`), or
        a job whose version could not be deleted when it failed. No row will name them: what a job
        makes has a number above those that are there.
        """
        kept = {one.version for one in await self._store.checkpoints(policy)}
        there = await self._adapters.off_loop(self._adapters.versions, policy)
        for version in set(there) - kept - {0, target}:
            with suppress(Damaged):  # it stays, and its number is not used again
                await self._adapters.off_loop(self._adapters.check, policy, version)
                log.warning("%s@%d, which no job has published, is deleted", policy, version)
                await self._adapters.off_loop(self._adapters.delete, policy, version)

    async def drop_policy(self, policy: str) -> None:
        """Delete a policy with all its versions, and route its names no more.

        Raises:
            LeaseLost: another server has the policy by now.
            Conflict: a job that has not ended needs it.
        """
        async with self._lock:
            versions = await self._adapters.off_loop(self._adapters.versions, policy)
            for version in versions:
                await self._adapters.off_loop(self._adapters.announce, policy, version)
            await self._store.delete_policy(policy)
            await self._router.remove(policy)
            for version in versions:
                await self._adapters.off_loop(self._adapters.delete, policy, version)

    async def go_on(self, policy: str | None = None) -> None:
        """Delete the files of announced versions whose rows are gone; None: of all policies."""
        async with self._lock:
            for name, version in await self._adapters.off_loop(self._adapters.announced):
                if policy in (None, name):
                    kept = await self._store.checkpoints(name)
                    is_kept = any(one.version == version for one in kept)
                    act = self._adapters.spare if is_kept else self._adapters.delete
                    await self._adapters.off_loop(act, name, version)
