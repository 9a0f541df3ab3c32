"""Follower of a fleet's other servers, whose changes are routed to within a second.

The database says which version serves. A server looks at it twice a second, loads a version into
its own sampler, and then routes to it. A call is routed by what the database said at most
`STALE_SECONDS` before: a server that was asleep, cannot reach the database or is still loading has
the call wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Sequence

from langchain_art.errors import ArtError, EngineUnavailable
from langchain_art_server.backends.base import EarlierCall
from langchain_art_server.jobs.job_runner import JobRunner
from langchain_art_server.policies.router import Router
from langchain_art_server.storage.fleet import begin_call
from langchain_art_server.storage.rollout_queue import ChangeSignal, wait_for
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import CallRecord

log = logging.getLogger(__name__)
#: Seconds between two looks of which no call waits; after which what was seen is not relied on; for
#: which a call waits for a look; and between two looks at least.
LOOK_SECONDS, STALE_SECONDS, WAIT_SECONDS, _PAUSE = 0.4, 1.0, 30.0, 0.02
#: Runs whose calls this server's sampler knows the tokens of.
_MAX_RUNS = 10_000


class Fleet:
    """One server's view of what all of a fleet do; of one tenant."""

    def __init__(self, store: Store, router: Router, jobs: JobRunner) -> None:
        self._store, self._router, self._jobs = store, router, jobs
        self._news, self._looked = asyncio.Event(), ChangeSignal()
        #: Policy -> when the database said that the version serves which it is routed to here.
        self._as_of: dict[str, float] = {}
        self._seen = -math.inf  # when the last look began
        self._kept: set[tuple[str, int]] = set()
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._known: OrderedDict[str, set[str]] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look, and go on looking."""
        await self._look()
        self._router.before_use = self._before_use
        self._task = asyncio.create_task(self._look_for_ever())

    async def close(self) -> None:
        """Look no more."""
        tasks = [*self._loading.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def begin_call(self, run: str | None) -> tuple[int, Sequence[EarlierCall]]:
        """`storage.fleet.begin_call`, with the calls that other servers have answered."""
        known = self._known.get(run, set()) if run is not None else set()
        began, others = await begin_call(self._store, run, known)
        if run is not None and others:
            self.knows(run, [one.id for one in others])
        return began, [_earlier(one) for one in others]

    def knows(self, run: str, calls: Sequence[str]) -> None:
        """This server's sampler knows the tokens of these calls of a run."""
        self._known.setdefault(run, set()).update(calls)
        self._known.move_to_end(run)
        while len(self._known) > _MAX_RUNS:
            self._known.popitem(last=False)

    async def _look_for_ever(self) -> None:
        while True:
            await wait_for(self._news, LOOK_SECONDS)
            self._news.clear()
            try:
                await self._look()
            except ArtError as error:  # the database does not answer; health says so
                log.warning("What the other servers do could not be read: %s", error)
            except Exception:
                log.exception("What the other servers do could not be read.")
            await asyncio.sleep(_PAUSE)

    async def _look(self) -> None:
        begun = time.monotonic()
        serving, self._kept = await self._store.served()
        for policy in {**self._router.serving, **serving}:
            version = serving.get(policy)
            if version is not None and self._router.serving.get(policy) == version:
                self._as_of[policy] = begun
            elif policy not in self._loading:
                task = asyncio.create_task(self._load(policy))
                self._loading[policy] = task
                task.add_done_callback(lambda _, name=policy: self._loading.pop(name))
        await self._router.keep(self._kept, lambda name: self._store.leases.here(name).locked())
        self._seen = begun
        await self._jobs.look()
        self._looked.notify()

    async def _load(self, policy: str) -> None:
        """Load the version that serves, and route to it; what changes it here does that itself."""
        try:
            async with self._store.leases.here(policy):
                begun = time.monotonic()
                version = (await self._store.served())[0].get(policy)
                if version is None:
                    self._as_of.pop(policy, None)
                    await self._router.remove(policy)
                    return
                if self._router.serving.get(policy) != version:
                    await self._router.serve(policy, version)
                    await self._router.trim()
                self._as_of[policy] = begun
        except ArtError as error:  # the next look tries again
            log.error("Policy %s is not routed to the version that serves: %s", policy, error)
            await asyncio.sleep(LOOK_SECONDS)
        self._looked.notify()

    async def _before_use(self, model: str) -> bool:
        """Wait until a name is routed as the database says; whether there is one.

        Raises EngineUnavailable: that takes too long.
        """
        policy, at, number = model.partition("@")
        begun = time.monotonic()
        if self._is_fresh(policy, at, number, begun):
            return True
        self._news.set()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not self._is_fresh(policy, at, number, time.monotonic()):
                    if self._seen >= begun and not self._is_known(policy, at, number):
                        return False
                    await self._looked.next().wait()
        except TimeoutError:
            raise EngineUnavailable(
                f"For {WAIT_SECONDS:g} s this server could not read which version of {policy!r} "
                "serves, or not load it. Send the request again.",
                retry_after=5,
            ) from None
        return True

    def _is_known(self, policy: str, at: str, number: str) -> bool:
        if at:
            return number.isdecimal() and (policy, int(number)) in self._kept
        return any(name == policy for name, _ in self._kept)

    def _is_fresh(self, policy: str, at: str, number: str, now: float) -> bool:
        if policy == self._router.base_name:
            return True
        if at:
            return policy in self._router.serving and self._is_known(policy, at, number)
        return now - self._as_of.get(policy, -math.inf) <= STALE_SECONDS


def _earlier(call: CallRecord) -> EarlierCall:
    return EarlierCall(
        messages=call.request["messages"],
        tools=call.shown_tools,
        reply=call.reply,
        prompt_token_ids=list(call.prompt_token_ids),
        token_ids=list(call.token_ids),
    )
