"""Policies and their versions: made, served, rolled back, deleted."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from langchain_art import wire
from langchain_art.errors import (
    ArtError,
    ConfigError,
    Conflict,
    Damaged,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    RequestRefused,
)
from langchain_art_server.backends.base import Sampler
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.config import Settings
from langchain_art_server.gateway.health import Health
from langchain_art_server.jobs.eligibility import steps_since
from langchain_art_server.jobs.job_runner import JobRunner
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.policies.router import MAX_PINNED_LOADED, Router
from langchain_art_server.storage.store import Store

log = logging.getLogger(__name__)
#: Bytes of free disk below which a failed write is laid to its being full.
_LITTLE_DISK = 1 << 26


class Policies:
    """The policies of one tenant; `others` counts those of the others."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        adapters: AdapterStore,
        router: Router,
        jobs: JobRunner,
        sampler: Sampler,
        learner: PeftLearner,
        health: Health,
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        self._settings, self._store, self._adapters = settings, store, adapters
        self._router, self._jobs, self._health = router, jobs, health
        self._sampler, self._learner = sampler, learner
        self._others = others
        self._lock = asyncio.Lock()
        #: A version is not rolled back to while it is deleted.
        self._rollback = asyncio.Lock()

    async def start(self) -> None:
        """Serve the versions that served before, and make the policies that the settings name.

        Raises ConfigError: a policy has no usable version left, or the base model's name, or was
        trained with another chat template.
        """
        await self._jobs.retention.go_on()
        for name, (_, serving) in (await self._store.policies()).items():
            if name == (base := self._router.base_name):
                raise ConfigError(
                    f"The base model's name is {base!r}, and a policy {name!r} is kept, for which "
                    "it would answer. Start with another --served-model-name."
                )
            await self._router.serve(name, await self._usable(name, serving))
        for name in self._settings.policies:
            await self.create(wire.PolicySpec(name=name, lora=self._settings.lora))

    async def _usable(self, policy: str, serving: int) -> int:
        """`serving`, or if that is damaged the newest whole version before it, which is logged.

        If none of those that it descends from is whole, it is the newest whole one of all.
        """
        why = ""
        before = steps_since(await self._store.jobs.parents(policy), serving)
        kept = [one.version for one in await self._store.checkpoints(policy)]
        kept.sort(key=lambda version: (version in before, version), reverse=True)
        for version in [serving, *kept]:
            try:
                found = await self._adapters.off_loop(self._adapters.check, policy, version)
            except Damaged as error:
                log.error("%s", error)
                why = why or str(error)
                continue
            mine, trained = (
                one or "of the model"
                for one in (self._settings.template_id, found.get("chat_template"))
            )
            if version and mine != trained:
                raise ConfigError(
                    f"Policy {policy!r} was trained with the chat template {trained}, and this "
                    f"server has the chat template {mine}: its "
                    "prompts would be others than those that it learned from. Start with the "
                    "--chat-template that it was trained with, or with another --data-dir."
                )
            base, here = found.get("base_model", ""), self._settings.model
            if version and Path(base).name != Path(here).name:  # a folder may have been moved
                log.warning(
                    "%s@%d was trained on the base model %r, and this server has %r. Unless that "
                    "is the same model by another name, its adapter does not fit: start with the "
                    "model that it was trained on, or with another --data-dir.",
                    *(policy, version, base, here),
                )
            if version != serving:
                log.error("%s@%d cannot be used; serving @%d", policy, serving, version)
                async with self._store.leases.hold(policy):
                    await self._store.roll_back(policy, version, why)
            return version
        raise ConfigError(
            f"No version of policy {policy!r} under {self._adapters} is whole. Put one back from "
            "a backup, or start with another --data-dir."
        )

    async def create(self, spec: wire.PolicySpec) -> wire.PolicyStatus:
        """Create a policy whose version 0 answers as the base model does. Idempotent.

        Raises:
            Conflict: it exists with another LoRA shape, or the name is the base model's.
            QuotaExceeded: there are `max_policies`, `max_stored_bytes` are stored, or the sampler
                has no memory for the policy's versions.
        """
        if spec.name == self._router.base_name:
            raise Conflict(f"{spec.name!r} is the base model's name; name the policy otherwise.")
        async with self._lock:
            known = await self._store.policies()
            if spec.name not in known:
                if len(known) + self._others() >= (most := self._settings.max_policies):
                    raise QuotaExceeded(
                        f"The server's setting max_policies is {most}, for the policies of all "
                        f"tenants, and there are as many; {len(known)} are yours. Delete one, or "
                        "raise it."
                    )
                self._health.require_space()
                async with self._store.leases.hold(spec.name):
                    if spec.name not in await self._store.policies():  # made by another server
                        await self._first_version(spec)
        made = await self.get(spec.name)
        if made.lora != spec.lora:
            raise Conflict(
                f"Policy {spec.name!r} exists with {made.lora!r}, got {spec.lora!r}. "
                "A policy's shape is fixed; make another policy.",
                param="lora",
            )
        return made

    async def _first_version(self, spec: wire.PolicySpec) -> None:
        # Of an attempt that failed, or of a policy whose deletion was interrupted.
        kept = (await self._store.served())[1]
        named = {version for name, version in kept if name == spec.name}
        there = await self._adapters.off_loop(self._adapters.versions, spec.name)
        for version in {*named, *there}:
            await self._jobs.retention.drop(spec.name, version)
        about = {"policy": spec.name, "version": 0, "parent": None, "job": None}
        about |= {"base_model": self._settings.model, "metrics": {}, "created_at": time.time()}
        staged = self._adapters.stage()
        try:
            await self._learner.init_adapter(staged, spec.lora)
            state = await self._sampler.state()
            require_memory(spec.name, staged, None if state is None else state.free_bytes)
            await self._adapters.off_loop(self._adapters.publish, staged, spec.name, 0, about)
        except (ArtError, OSError) as error:
            full = shutil.disk_usage(staged.parent).free < _LITTLE_DISK
            self._adapters.discard(staged)
            asked_wrongly = isinstance(error, ConfigError | RequestRefused)
            if full and (isinstance(error, EngineUnavailable) or not asked_wrongly):
                raise EngineUnavailable(
                    f"The policy could not be made, and {self._settings.data_dir} has no space "
                    f"left ({error}). Free disk space, then send the request again.",
                    retry_after=30,
                ) from error
            raise
        await self._store.add_checkpoint(self._adapters.checkpoint(about))
        await self._router.load(spec.name, 0)
        await self._store.add_policy(spec.name, spec.lora)
        await self._router.serve(spec.name, 0)

    async def delete(self, name: str) -> None:
        """Delete a policy with all its versions. A new one of its name gets other versions' names.

        Raises:
            NotFound: there is none.
            Conflict: a job that has not ended needs it, or a call is answered by it.
        """
        await self.get(name)
        await self._store.refuse_open_jobs(name)
        async with self._lock, self._store.leases.hold(name):
            if calls := self._router.users(name):
                raise Conflict(f"Policy {name!r} is answering {calls} calls now; try again then.")
            await self._jobs.retention.drop_policy(name)

    async def get(self, name: str) -> wire.PolicyStatus:
        """Raises NotFound."""
        for status in await self.all():
            if status.name == name:
                return status
        raise NotFound(f"No policy {name!r}; there are {sorted(await self._store.policies())}.")

    async def all(self) -> list[wire.PolicyStatus]:
        """All policies, by name."""
        kept = Counter(name for name, _ in (await self._store.served())[1])
        return [
            wire.PolicyStatus(name=name, version=serving, lora=lora, checkpoints=kept[name])
            for name, (lora, serving) in (await self._store.policies()).items()
        ]

    async def checkpoint(self, policy: str, version: int) -> wire.Checkpoint:
        """Raises NotFound."""
        await self.get(policy)
        kept = await self._store.checkpoints(policy)
        for checkpoint in kept:
            if checkpoint.version == version:
                return checkpoint
        raise NotFound(f"{policy}@{version} is not kept; kept are {[c.version for c in kept]}.")

    async def set_pinned(self, policy: str, version: int, pinned: bool) -> wire.Checkpoint:
        """Protect a version from retention, or stop protecting it."""
        await self.checkpoint(policy, version)
        await self._store.set_pinned(policy, version, pinned)
        return await self.checkpoint(policy, version)

    async def rollback(self, policy: str, version: int, why: str = "") -> wire.PolicyStatus:
        """Route the policy's bare name to a kept version; the next step starts from it.

        What that takes out of service is shown with `why` (`wire.Checkpoint.rolled_back`).

        Raises Damaged: its files are not what was published.
        """
        async with self._store.leases.hold(policy), self._rollback:
            await self.checkpoint(policy, version)
            await self._adapters.off_loop(self._adapters.check, policy, version)
            await self._router.load(policy, version)
            await self._store.roll_back(policy, version, why)
            await self._router.serve(policy, version)
            await self._router.trim()
        return await self.get(policy)

    async def delete_version(self, policy: str, version: int) -> None:
        """Delete a version.

        Raises:
            NotFound: it is not kept.
            InvalidRequest: it serves, is pinned, or is in use.
            Conflict: a job that has not ended needs it.
        """
        leases = self._store.leases  # of a fleet: another server may roll back to it
        async with leases.hold(policy) if self._store.shared else nullcontext(), self._rollback:
            checkpoint = await self.checkpoint(policy, version)
            if checkpoint.serving or checkpoint.pinned:
                why = "serves now; roll back" if checkpoint.serving else "is pinned; unpin"
                raise InvalidRequest(f"{checkpoint.name} {why} first.")
            await self._jobs.retention.drop(policy, version)

    async def archive(self, policy: str, version: int) -> bytes:
        """See `AdapterStore.archive`."""
        await self.checkpoint(policy, version)
        return await self._adapters.off_loop(self._adapters.archive, policy, version)


def require_memory(policy: str, adapter: Path, free: float | None) -> None:
    """Refuse a policy for whose versions the sampler's device has no room.

    That is the first one, whose folder is `adapter`, the next one beside it, and those that stay
    loaded for a while. Raises QuotaExceeded if less bytes are `free` (None: unknown, or set aside).
    """
    size = sum(file.stat().st_size for file in adapter.iterdir())
    versions = 2 + MAX_PINNED_LOADED
    if free is not None and size * versions > free:
        raise QuotaExceeded(
            f"Policy {policy!r} has adapters of {_mib(size)}, of which the sampler may have to "
            f"hold {versions} more at once, and its device has {_mib(free)} free. Make it with a "
            "smaller rank or fewer targets, delete a policy that is not used, or give the "
            "sampler's cache less ([sampler] kv_cache_bytes)."
        )


def _mib(size: float) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
