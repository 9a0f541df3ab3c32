"""What the routes share: store, adapters, router, sampler, learner and jobs; start and stop."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections import Counter
from dataclasses import replace

from langchain_art import wire
from langchain_art._version import __version__
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
from langchain_art_server.backends.base import Learner, Sampler
from langchain_art_server.backends.ipc.longest_pause import LongestPause, watch_event_loop
from langchain_art_server.config import Settings
from langchain_art_server.gateway.call_slots import CallSlots
from langchain_art_server.gateway.data_dir import make_private, own
from langchain_art_server.gateway.health import Health
from langchain_art_server.jobs.audit import audit
from langchain_art_server.jobs.job_runner import JobRunner
from langchain_art_server.jobs.sft_records import demonstrations
from langchain_art_server.jobs.trajectory_assembly import assemble
from langchain_art_server.policies.adapter_store import AdapterStore, make_directory
from langchain_art_server.policies.router import Router
from langchain_art_server.storage.store import Store

log = logging.getLogger(__name__)
#: Bytes of free disk below which a failed write is laid to its being full.
_LITTLE_DISK = 1 << 26


class Service:
    """The parts of one server. Call `start` before serving and `close` after."""

    def __init__(self, settings: Settings, sampler: Sampler, learner: Learner) -> None:
        self.settings, self.sampler, self.learner = settings, sampler, learner
        try:
            make_directory(settings.data_dir.resolve())
            make_private(settings.data_dir)
            self._lock = own(settings.data_dir)
            self.adapters = AdapterStore(settings.data_dir / "adapters")
        except OSError as error:
            raise ConfigError(
                f"got data_dir={str(settings.data_dir)!r}, expected a directory that this server "
                f"can write to: {error}"
            ) from error
        self.store = Store(settings.url)
        self.router = Router(settings.base_name, self.adapters, sampler)
        self.jobs = JobRunner(settings, self.store, self.adapters, self.router, sampler, learner)
        self.slots = CallSlots(settings.max_running_calls)
        engines = {"sampler": sampler, "learner": learner}
        self.health = Health(engines, self.store, settings.data_dir, settings.max_stored_bytes)
        self._pauses, self._watch = LongestPause(), list[asyncio.Task[None]]()
        self._started = time.monotonic()
        self._policy_lock = asyncio.Lock()

    async def start(self) -> None:
        """Start the engines, serve the versions that served before, resume unfinished jobs.

        Raises:
            ConfigError: the model cannot be loaded, or a policy has no usable version left.
        """
        self._watch.append(asyncio.create_task(watch_event_loop(self._pauses)))
        await asyncio.gather(self.sampler.start(), self.learner.start())
        for name, (_, serving) in (await self.store.policies()).items():
            await self.router.serve(name, await self._usable(name, serving))
        for name in self.settings.policies:
            await self.create_policy(wire.PolicySpec(name=name, lora=self.settings.lora))
        await self.jobs.start()
        self.health.start()

    async def close(self) -> None:
        """Stop jobs and engines, and write what the store has queued."""
        await self.health.close()
        for watch in self._watch:
            watch.cancel()
        await self.jobs.close()
        await asyncio.gather(self.sampler.close(), self.learner.close())
        await asyncio.to_thread(self.store.close)
        self._lock.close()

    async def _usable(self, policy: str, serving: int) -> int:
        """`serving`, or the newest undamaged version if that is damaged, which is logged."""
        for version in [serving, *reversed(self.adapters.versions(policy))]:
            try:
                self.adapters.check(policy, version)
            except Damaged as error:
                log.error("%s", error)
                continue
            if version != serving:
                log.error("%s@%d cannot be used; serving @%d", policy, serving, version)
                await self.store.set_serving(policy, version)
            return version
        raise ConfigError(
            f"No version of policy {policy!r} under {self.settings.data_dir} is whole. Put back "
            "its directory from a backup, or start with another --data-dir."
        )

    # --- policies -------------------------------------------------------------------------------

    async def create_policy(self, spec: wire.PolicySpec) -> wire.PolicyStatus:
        """Create a policy whose version 0 answers as the base model does. Idempotent.

        Raises:
            Conflict: it exists with another LoRA shape, or the name is the base model's.
            QuotaExceeded: there are `max_policies`, or `max_stored_bytes` are stored.
        """
        if spec.name == self.router.base_name:
            raise Conflict(f"{spec.name!r} is the base model's name; name the policy otherwise.")
        async with self._policy_lock:
            known = await self.store.policies()
            if spec.name in known and known[spec.name][0] != spec.lora:
                raise Conflict(
                    f"Policy {spec.name!r} exists with {known[spec.name][0]!r}, got {spec.lora!r}. "
                    "A policy's shape is fixed; make another policy.",
                    param="lora",
                )
            if spec.name not in known:
                if len(known) >= (most := self.settings.max_policies):
                    raise QuotaExceeded(
                        f"There are {len(known)} policies, and the server's setting max_policies "
                        f"is {most}. Delete one, or raise it."
                    )
                self.health.require_space()
                await self._first_version(spec)
        return await self.policy(spec.name)

    async def _first_version(self, spec: wire.PolicySpec) -> None:
        # Of an attempt that failed, or of a policy whose deletion was interrupted.
        for version in {0, *self.adapters.versions(spec.name)}:
            await self.jobs.drop_version(spec.name, version)
        about = {"policy": spec.name, "version": 0, "parent": None, "job": None}
        about |= {"base_model": self.settings.model, "metrics": {}, "created_at": time.time()}
        staged = self.adapters.stage()
        try:
            await self.learner.init_adapter(staged, spec.lora)
            await asyncio.to_thread(self.adapters.publish, staged, spec.name, 0, about)
        except (ArtError, OSError) as error:
            full = shutil.disk_usage(staged.parent).free < _LITTLE_DISK
            self.adapters.discard(staged)
            asked_wrongly = isinstance(error, ConfigError | RequestRefused)
            if full and (isinstance(error, EngineUnavailable) or not asked_wrongly):
                raise EngineUnavailable(
                    f"The policy could not be made, and {self.settings.data_dir} has no space left "
                    f"({error}). Free disk space, then send the request again.",
                    retry_after=30,
                ) from error
            raise
        await self.store.add_checkpoint(self.adapters.checkpoint(about))
        await self.router.serve(spec.name, 0)
        await self.store.add_policy(spec.name, spec.lora)

    async def delete_policy(self, name: str) -> None:
        """Delete a policy with all its versions. A new one of its name gets other versions' names.

        Raises:
            NotFound: there is none.
            Conflict: a job of it has not ended, or a call is answered by it.
        """
        await self.policy(name)
        await self.store.refuse_open_jobs(name)
        async with self._policy_lock, self.jobs.between_steps(name):
            if calls := self.router.users(name):
                raise Conflict(f"Policy {name!r} is answering {calls} calls now; try again then.")
            await self.store.delete_policy(name)
            await self.router.remove(name)
            for version in self.adapters.versions(name):
                await asyncio.to_thread(self.adapters.delete, name, version)

    async def policy(self, name: str) -> wire.PolicyStatus:
        """Raises NotFound."""
        for status in await self.policies():
            if status.name == name:
                return status
        raise NotFound(f"No policy {name!r}; there are {sorted(self.router.serving)}.")

    async def policies(self) -> list[wire.PolicyStatus]:
        """All policies, by name."""
        return [
            wire.PolicyStatus(
                name=name,
                version=self.router.serving[name],
                lora=lora,
                checkpoints=len(self.adapters.versions(name)),
            )
            for name, (lora, _) in (await self.store.policies()).items()
        ]

    async def checkpoint(self, policy: str, version: int) -> wire.Checkpoint:
        """Raises NotFound."""
        await self.policy(policy)
        kept = await self.store.checkpoints(policy)
        for checkpoint in kept:
            if checkpoint.version == version:
                return checkpoint
        raise NotFound(f"{policy}@{version} is not kept; kept are {[c.version for c in kept]}.")

    async def set_pinned(self, policy: str, version: int, pinned: bool) -> wire.Checkpoint:
        """Protect a version from retention, or stop protecting it."""
        await self.checkpoint(policy, version)
        await self.store.set_pinned(policy, version, pinned)
        return await self.checkpoint(policy, version)

    async def rollback(self, policy: str, version: int) -> wire.PolicyStatus:
        """Route the policy's bare name to a kept version; the next step starts from it.

        Raises:
            Damaged: its files are not what was published.
        """
        await self.checkpoint(policy, version)
        async with self.jobs.between_steps(policy):
            await asyncio.to_thread(self.adapters.check, policy, version)
            await self.router.serve(policy, version)
            await self.router.trim()
            await self.store.set_serving(policy, version)
        return await self.policy(policy)

    async def delete_checkpoint(self, policy: str, version: int) -> None:
        """Raises InvalidRequest if the version serves, is pinned, or is in use."""
        checkpoint = await self.checkpoint(policy, version)
        if checkpoint.serving or checkpoint.pinned:
            why = "serves now; roll back first" if checkpoint.serving else "is pinned; unpin first"
            raise InvalidRequest(f"{checkpoint.name} {why}.")
        await self.jobs.drop_version(policy, version)

    async def adapter_tar(self, policy: str, version: int) -> bytes:
        """See `AdapterStore.archive`."""
        await self.checkpoint(policy, version)
        return await asyncio.to_thread(self.adapters.archive, policy, version)

    # --- trajectories and jobs ------------------------------------------------------------------

    async def reward(self, trajectory_id: str, reward: wire.Reward) -> wire.Trajectory:
        """Set rewards of a trajectory; without one, assemble it from the calls tagged with its id.

        Calls that were tagged after it was assembled join it, until a job uses it.

        Raises:
            NotFound: neither the trajectory nor a call tagged with its id is known.
            InvalidRequest: it does not have a call that a reward is for.
            Conflict: a job uses it, and a reward of it or its calls would change.
        """
        stored = (await self.store.trajectories([trajectory_id])).get(trajectory_id)
        if stored is not None and not stored.assembled:
            return await self.store.set_reward(trajectory_id, reward)
        calls = await self.store.tagged_calls(trajectory_id)
        if not calls:
            raise NotFound(
                f"No trajectory {trajectory_id!r} is stored, and no call was tagged with it "
                '(extra_body={"art": {"trajectory_id": …}}, or header x-art-trajectory-id).'
            )
        assembled = await asyncio.to_thread(assemble, trajectory_id, calls)
        return await self.store.set_reward(trajectory_id, reward, assembled)

    async def audit(
        self,
        trajectory_id: str,
        policy: str | None,
        trainable: dict[str, bool],
        *,
        sft: bool = False,
    ) -> wire.TrajectoryAudit:
        """See `jobs.audit.audit`.

        Raises:
            NotFound: there is no such trajectory or policy.
            InvalidRequest: `sft`, and a turn cannot be rendered by the chat template.
        """
        if policy is not None:
            await self.policy(policy)
        stored = await self.store.trajectory(trajectory_id)
        ids = [t.call_id for t in stored.trajectory.turns if t.call_id]
        records, elsewhere = await self.store.calls(ids), set[str]()
        if sft:
            longest = self.sampler.info.max_model_len
            [run], records = await demonstrations(
                [stored.trajectory], records, self.learner, longest
            )
            stored = replace(stored, trajectory=run)
        else:
            marks, mine = await self.store.trained_calls(ids), set(stored.trained_by.values())
            elsewhere = {one for one, job in marks.items() if job not in mine}
        return await asyncio.to_thread(
            audit, stored, records, policy, trainable, imitates=sft, trained=elsewhere
        )

    async def train(self, request: wire.TrainRequest, key: str) -> wire.TrainJob:
        """Queue a job, once per key.

        Raises:
            NotFound: there is no such policy or trajectory.
            Conflict: the key was used for another request.
            Overloaded: `max_queued_jobs` have not ended.
            QuotaExceeded: `max_stored_bytes` are stored.
        """
        self.health.require_space()
        await self.policy(request.policy)
        ids = [one for group in request.groups for one in group]
        if twice := sorted(one for one, times in Counter(ids).items() if times > 1)[:5]:
            raise InvalidRequest(
                f"got {twice} more than once, expected distinct ids", param="groups"
            )
        known = await self.store.trajectories(ids)
        if missing := [one for one in ids if one not in known]:
            raise NotFound(
                f"{len(missing)} of {len(ids)} trajectories are not stored here: {missing[:5]} … "
                "Send them with POST /v1/groups first.",
                param="groups",
            )
        runs = [known[one].trajectory for one in ids]
        job = await self.store.jobs.add(
            f"job-{uuid.uuid4().hex}", key, request, runs, self.settings.max_queued_jobs
        )
        self.jobs.wake()
        return job

    async def status(self) -> wire.ServerStatus:
        """For ``GET /status``."""
        info = self.sampler.info
        calls, trajectories, jobs = await self.store.counts()
        return wire.ServerStatus(
            version=__version__,
            ready=not self.health.reasons,
            reasons=self.health.reasons,
            base_model=info.name,
            model_path=info.path,
            device=info.device,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            parameters=info.parameters,
            sampler=type(self.sampler).__name__,
            learner=type(self.learner).__name__,
            policies=tuple(await self.policies()),
            calls=calls,
            trajectories=trajectories,
            jobs=jobs,
            stored_bytes=self.health.stored_bytes,
            running_calls=self.slots.running,
            engine_restarts=self.sampler.restarts + self.learner.restarts,
            gateway_pause=self._pauses.seconds,
            sampler_pause=await self.sampler.longest_pause(),
            uptime=time.monotonic() - self._started,
        )
