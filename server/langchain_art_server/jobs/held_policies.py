"""Policies that are being changed: by one task of this server at a time, and by no other server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from langchain_art.errors import ArtError
from langchain_art_server.storage.fleet.policy_leases import (
    RENEW_SECONDS,
    PolicyLease,
    PolicyLeases,
)

log = logging.getLogger(__name__)
#: Seconds between two tries to get what another server has.
_AGAIN_SECONDS = 0.1


class HeldPolicies:
    """Gives policies to those who change them; renews the leases while they do."""

    def __init__(self, leases: PolicyLeases) -> None:
        self._leases = leases
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def here(self, policy: str) -> asyncio.Lock:
        """A context in which nothing of this server changes the policy."""
        return self._locks[policy]

    @asynccontextmanager
    async def hold(self, policy: str) -> AsyncGenerator[PolicyLease]:
        """A context in which nothing else changes the policy; entering it waits for that.

        What is written in it takes the lease along: it may be lost if this server sleeps.
        """
        async with self._locks[policy]:
            while (lease := await self._leases.take(policy)) is None:
                await asyncio.sleep(_AGAIN_SECONDS)
            async with self._renewed(lease, lambda: None):
                yield lease

    @asynccontextmanager
    async def hold_for(
        self, policy: str, job_id: str, on_lost: Callable[[], None]
    ) -> AsyncGenerator[PolicyLease | None]:
        """`hold` for a job; None if it has ended, or another server has the policy.

        `on_lost` is called when another server has taken the lease over.
        """
        async with self._locks[policy]:
            if (lease := await self._leases.take(policy, job_id)) is None:
                yield None
                return
            async with self._renewed(lease, on_lost):
                yield lease

    @asynccontextmanager
    async def _renewed(
        self, lease: PolicyLease, on_lost: Callable[[], None]
    ) -> AsyncGenerator[None]:
        renewing = asyncio.create_task(self._renew(lease, on_lost))
        try:
            yield
        finally:
            renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await renewing
            try:
                await self._leases.release(lease)
            except ArtError as error:
                log.warning("The lease of policy %r ends by itself: %s", lease.policy, error)

    async def _renew(self, lease: PolicyLease, on_lost: Callable[[], None]) -> None:
        while self._leases.are_needed:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                if not await self._leases.renew(lease):
                    on_lost()
                    return
            except ArtError as error:  # the lease may be lost by now: then nothing is written
                log.warning("The lease of policy %r was not renewed: %s", lease.policy, error)
