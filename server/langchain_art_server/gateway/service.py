"""Shared state of the routes: store, adapters, router, engines and jobs; start and stop."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from langchain_art import wire
from langchain_art._version import __version__
from langchain_art.errors import ConfigError, InvalidRequest, NotFound
from langchain_art.wire.api_keys import DEFAULT_TENANT
from langchain_art.wire.choices import BUILT_IN_LOSSES
from langchain_art_server.backends.base import EarlierCall, Sampler
from langchain_art_server.backends.ipc.heartbeat import LoopLag, watch_event_loop
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.config import Settings
from langchain_art_server.gateway.fleet import Fleet
from langchain_art_server.gateway.health import Health
from langchain_art_server.gateway.keys.keyring import Access, Keyring
from langchain_art_server.gateway.keys.tenants import Tenants, require_servers_key, tenant_of
from langchain_art_server.gateway.limits import CallSlots
from langchain_art_server.gateway.policies import Policies
from langchain_art_server.gateway.sessions import Sessions
from langchain_art_server.jobs.audit import audit
from langchain_art_server.jobs.eligibility import steps_since
from langchain_art_server.jobs.job_runner import JobRunner
from langchain_art_server.jobs.sft_records import demonstrations
from langchain_art_server.jobs.trajectory_assembly import assemble
from langchain_art_server.policies.adapter_store import AdapterStore, make_directory
from langchain_art_server.policies.router import Router
from langchain_art_server.storage.database import lock_data_dir, make_private
from langchain_art_server.storage.store import Store
from langchain_art_server.telemetry.metrics import JobWatch, Metrics


class Service:
    """The parts of one server, or of one tenant. Call `start` before serving and `close` after.

    A tenant has a database, adapters, policies and jobs of its own, so that no query can reach
    another's; it shares the engines, the slots of calls and the learner's turns with `main`.
    """

    def __init__(
        self,
        settings: Settings,
        sampler: Sampler,
        learner: PeftLearner,
        tenant: str = DEFAULT_TENANT,
        main: Service | None = None,
    ) -> None:
        self.settings, self.sampler, self.learner = settings, sampler, learner
        self.tenant = tenant
        #: Of the database and the adapters of this tenant, when they were last probed.
        self.stored_bytes = 0
        try:
            make_directory(settings.data_dir.resolve())
            make_private(settings.data_dir)
            self._lock = lock_data_dir(settings.data_dir, shared=settings.fleet)
            self.adapters = AdapterStore(settings.data_dir / "adapters", shared=settings.fleet)
        except OSError as error:
            raise ConfigError(
                f"got data_dir={str(settings.data_dir)!r}, expected a directory that this server "
                f"can write to: {error}"
            ) from error
        self.store = Store(settings.url, shared=settings.fleet, alike=settings.alike_in_words)
        self.router = Router(settings.base_name, self.adapters, sampler)
        self._main, beside = main or self, main.jobs if main else None
        self.metrics = main.metrics if main else Metrics()
        self.router.on_remove = partial(self.metrics.forget, tenant)
        watch = JobWatch(self.metrics, tenant)
        parts = (settings, self.store, self.adapters, self.router)
        self.jobs = JobRunner(*parts, sampler, learner, beside, watch)
        #: None: the database is this server's alone.
        self.fleet = Fleet(self.store, self.router, self.jobs) if settings.fleet else None
        #: Longest time that the event loop did not turn, in the last minute or two.
        self.lag, self._watch = LoopLag(), list[asyncio.Task[None]]()
        self._started = time.monotonic()
        #: Whether the server ends: answers that have no end of their own are ended then.
        self.is_stopping: Callable[[], bool] = lambda: False
        if main is None:
            self.tenants = Tenants(self)
            self.slots = CallSlots(settings.max_running_calls)
            key = settings.api_key.get_secret_value() if settings.api_key else None
            self.sessions = Sessions(key) if key else None
            self.keys = Keyring(key, self.store.keys) if key else None
            engines = {"sampler": sampler, "learner": learner}
            bounds = settings.max_stored_bytes, settings.min_free_bytes
            measure = self.tenants.measure
            self.health = Health(engines, self.store, settings.data_dir, *bounds, measure)
        else:
            self.tenants, self.slots, self.health = main.tenants, main.slots, main.health
            self.sessions, self.keys, self.lag = main.sessions, main.keys, main.lag
            self.is_stopping = lambda: main.is_stopping()
        self.jobs.is_held = lambda: self.health.is_disk_full
        self.policies = Policies(
            *parts, self.jobs, sampler, learner, self.health, self._others_policies
        )

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of all losses: the built-in ones and the operator's own."""
        return (*BUILT_IN_LOSSES, *self.settings.losses)

    async def start(self) -> None:
        """Start the engines, serve the versions that served before, resume unfinished jobs.

        Raises ConfigError: the model cannot be loaded, a policy has no usable version left, or
        there are keys and the server has none of its own.
        """
        if self._main is self:
            await require_servers_key(self.store.keys, self.keys)
            self._watch.append(asyncio.create_task(watch_event_loop(self.lag)))
            await self._start_engines()
        await self.policies.start()
        if self.fleet is None:
            await self.store.rollouts.resume()
        else:  # the others have renewed what was asked of them
            await self.fleet.start()
        await self.jobs.start()
        if self._main is self:
            await self.tenants.start()
            self.health.start()

    async def begin_call(self, run: str | None) -> tuple[int, Sequence[EarlierCall]]:
        """See `Fleet.begin_call`."""
        if self.fleet is None:
            return self.store.next_began(), ()
        return await self.fleet.begin_call(run)

    def _others_policies(self) -> int:
        """The policies of all other tenants."""
        return sum(len(one.router.serving) for one in self.tenants if one is not self)

    @property
    def no_images(self) -> str:
        """Reason why calls may have no images, in words; empty: they may."""
        return self.sampler.info.no_images or self.learner.no_images

    @property
    def running_calls(self) -> int:
        """This tenant's calls that wait or run."""
        mine = (n for name, n, _ in self.slots.clients() if tenant_of(name) == self.tenant)
        return sum(mine)

    async def note(self, access: Access | None, action: str, subject: str) -> None:
        """Write what a key has done into the server's log."""
        key = access.id if access is not None else None
        await self._main.store.keys.note(self.tenant, key, action, subject)

    async def _start_engines(self) -> None:
        """On one GPU vLLM starts first: what is taken meanwhile it takes off its own cache."""
        settings = self.settings
        if settings.sampler.takes_gpu and settings.device != "cpu":
            await self.sampler.start()
            await self.learner.start()
        else:
            await asyncio.gather(self.sampler.start(), self.learner.start())
        sampled, learned = self.sampler.info.weights, self.learner.weights
        if sampled != learned:
            raise ConfigError(
                f"got a sampler whose base has {sampled or 'unquantised weights'} and a learner "
                f"whose base has {learned or 'unquantised weights'}; expected the same weights: "
                'give the unquantised model and quantization = "nf4", which both load'
            )

    async def close(self) -> None:
        """Stop jobs and engines, and write what the store has queued."""
        if self._main is self:
            await self.health.close()
            await self.tenants.close()
        for watch in self._watch:
            watch.cancel()
        if self.fleet is not None:
            await self.fleet.close()
        await self.jobs.close()
        if self._main is self:
            await asyncio.gather(self.sampler.close(), self.learner.close())
        await asyncio.to_thread(self.store.close)
        self._lock.close()

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
            await self.policies.get(policy)
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
            for sampler in {one.policy for one in records.values() if one.policy}:
                elsewhere |= await self._trained_elsewhere(trajectory_id, ids, sampler)
        return await asyncio.to_thread(
            audit, stored, records, policy, trainable, imitates=sft, trained=elsewhere
        )

    async def _trained_elsewhere(self, run: str, calls: list[str], policy: str) -> set[str]:
        """The calls that jobs trained on the way to the version that serves, in other runs."""
        jobs, lineage = self.store.jobs, None
        if (serving := self.router.serving.get(policy)) is not None:
            lineage = steps_since(await jobs.parents(policy), serving)
        mine = (await jobs.trained_runs([run], policy)).get(run, set())
        marks = await jobs.trained_calls(calls, policy, lineage)
        return {call for call, by in marks.items() if not by & mine}

    async def train(self, request: wire.TrainRequest, key: str) -> wire.TrainJob:
        """Queue a job, once per key.

        Raises:
            NotFound: there is no such policy or trajectory.
            InvalidRequest: the server has no such loss, a run is in two groups, `turns` has a
                call of none of them, or `advantages` has not one for each turn of a run.
            Conflict: the key was used for another request.
            Overloaded: `max_queued_jobs` have not ended.
            QuotaExceeded, EngineUnavailable: as `Health.require_space`.
        """
        self.health.require_space()
        request = await self.rated(request)
        if (repeated := await self.store.jobs.repeated(key, request)) is not None:
            return repeated  # also if a run was deleted since
        runs = await self.checked(request)
        job = await self.store.jobs.add(
            f"job-{uuid.uuid4().hex}", key, request, runs, self.settings.max_queued_jobs
        )
        self.jobs.wake()
        return job

    async def rated(self, request: wire.TrainRequest) -> wire.TrainRequest:
        """A request with its learning rate. Raises NotFound if there is no such policy."""
        lora = (await self.policies.get(request.policy)).lora
        rated = wire.with_learning_rate(request.config, self.sampler.info.parameters, lora)
        return request.model_copy(update={"config": rated})

    async def checked(self, request: wire.TrainRequest) -> list[wire.Trajectory]:
        """The runs of a request that can be queued. Raises as `train`."""
        loss = getattr(request.config, "loss", None)
        if isinstance(loss, wire.OwnLoss) and loss.name not in self.losses:
            raise InvalidRequest(
                f"got the loss {loss.name!r}, expected one of {list(self.losses)}. Losses of your "
                "own are registered in the server's settings: [losses]",
                param="config.loss",
            )
        ids = [one for group in request.groups for one in group]
        if isinstance(request.config, wire.PreferenceConfig):
            ids = list(dict.fromkeys(ids))  # a run may be preferred to several, and the reverse
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
        calls = {turn.call_id for run in runs for turn in run.turns}
        if unknown := sorted(set(request.turns) - calls)[:5]:
            raise InvalidRequest(
                f"got rewards for the calls {unknown}, expected calls of the runs in `groups`",
                param="turns",
            )
        given = request.advantages or {}
        if wrong := [run for run in runs if len(given.get(run.id, run.turns)) != len(run.turns)]:
            run, told = wrong[0], len(given[wrong[0].id])
            raise InvalidRequest(
                f"got {told} advantages for the {len(run.turns)} turns of {run.id!r}, expected one "
                "for each: a number, numbers for its sampled tokens, or null",
                param="advantages",
            )
        return runs

    async def status(self) -> wire.ServerStatus:
        """Status for ``GET /status``."""
        info, sampler = self.sampler.info, self.settings.sampler
        state = await self.sampler.state()
        calls, trajectories, jobs = await self.store.counts()
        rollouts, workers = await self.store.rollouts.counts()
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
            sampler=type(self._main.sampler).__name__,
            learner=type(self.learner).__name__,
            replicas=self.sampler.replicas,
            losses=self.losses,
            policies=tuple(await self.policies.all()),
            max_policies=self.settings.max_policies,
            max_loras=sampler.max_loras if sampler.kind == "vllm" else None,
            calls=calls,
            trajectories=trajectories,
            jobs=jobs,
            rollouts=rollouts,
            workers=workers,
            stored_bytes=self.stored_bytes,
            free_bytes=self.health.free_bytes,
            min_free_bytes=self.settings.min_free_bytes,
            running_calls=self.running_calls,
            engine_restarts=self.sampler.restarts + self.learner.restarts,
            gateway_pause=self.lag.seconds,
            sampler_pause=None if state is None else state.loop_lag,
            uptime=time.monotonic() - self._started,
        )
