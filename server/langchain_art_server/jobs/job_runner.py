"""Runs training jobs: from groups of trajectories to a new version (checkpoint), exactly once.

A job is stored before it begins, with the version it starts from and the version it makes. The
learner builds that version in a staging directory, one rename publishes it, and one transaction
ends the job and routes the policy to it (hot swap). After a crash in between, a restart finds
either no such version (the step is computed again from the same parent, rewards and calls, with the
same result) or the version with this job's id in its manifest (only the rest is done): no batch is
trained twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from langchain_art.errors import ArtError, Conflict, EngineUnavailable, InvalidRequest, NotFound
from langchain_art.wire import PreferenceConfig, TrainConfig, TrainJob, TrainRequest, TrainResult
from langchain_art_server.backends.base import LearnerStep, Sampler
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.config import Settings
from langchain_art_server.jobs.admission_gate import AdmissionGate
from langchain_art_server.jobs.batch_builder import Batch
from langchain_art_server.jobs.eligibility import steps_since
from langchain_art_server.jobs.retention import Retention
from langchain_art_server.jobs.review_plan import require_untrained
from langchain_art_server.jobs.sft_records import (
    WeighedPairs,
    demonstrations,
    share_prompts,
    weigh_pairs,
)
from langchain_art_server.jobs.swap_check import NamedAdapter, SwapCheck, check_weights
from langchain_art_server.policies.adapter_store import ADAPTER_FILES, AdapterStore, VersionTaken
from langchain_art_server.policies.router import Router
from langchain_art_server.storage.fleet import LeaseLost
from langchain_art_server.storage.job_store import JobCancelled
from langchain_art_server.storage.reward_snapshot import RewardSnapshot
from langchain_art_server.storage.rollout_queue import ChangeSignal, wait_for
from langchain_art_server.storage.store import Store
from langchain_art_server.telemetry.metrics import JobWatch

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Pause before jobs go on after the store failed.
RETRY_SECONDS = 5.0
#: Pause between looks at whether jobs are held.
HELD_SECONDS = 0.5


@dataclass
class _Running:
    """The job that runs. It may be cancelled until its version is published.

    It is `lost` when another server has taken it over, or cancelled it.
    """

    id: str
    task: asyncio.Task[None]
    cancelled: bool = False
    publishing: bool = False
    lost: bool = False


class JobRunner:
    """Runs the jobs of one store one after the other, oldest first.

    With a runner `beside` it, of another tenant, they take turns. `watch` is notified of each job.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        adapters: AdapterStore,
        router: Router,
        sampler: Sampler,
        learner: PeftLearner,
        beside: JobRunner | None = None,
        watch: JobWatch | None = None,
    ) -> None:
        self._settings, self._store, self._adapters = settings, store, adapters
        self._router, self._sampler, self._learner = router, sampler, learner
        self._jobs, self.watch = store.jobs, watch or JobWatch()
        self.retention = Retention(store, adapters, router, settings.keep_checkpoints)
        self.gate = beside.gate if beside else AdmissionGate(settings.max_waiting_calls)
        #: Whether no further job is begun, since the server ends.
        self.draining = False
        #: Whose turn it is among the runners of one learner: each has one job after the other.
        self._turn: asyncio.Lock = beside._turn if beside is not None else asyncio.Lock()
        self._news = asyncio.Event()
        self._changed = ChangeSignal()
        self._task: asyncio.Task[None] | None = None
        self._running: _Running | None = None
        self._choosing = asyncio.Lock()
        #: Whether no job is to begin now: there is no space for what it would make.
        self.is_held: Callable[[], bool] = lambda: False

    async def start(self) -> None:
        """Run the jobs that are not ended, and those that come."""
        self._task = asyncio.create_task(self._loop())
        self._news.set()

    async def close(self) -> None:
        """Stop. The next start resumes an unfinished job."""
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def wake(self) -> None:
        """Call this when a job was added."""
        self._news.set()

    async def cancel(self, job_id: str) -> TrainJob:
        """Cancel a job: it never runs, or its step is stopped and nothing is published. Idempotent.

        Raises:
            NotFound: there is no such job.
            Conflict: it has ended, or its version is being published.
        """
        async with self._choosing:
            running, waits = self._running, not (await self._jobs.get(job_id)).ended
            if running is not None and running.id == job_id:
                waits = False  # `_run_next` says that it has ended
                if running.publishing:
                    raise Conflict(f"Job {job_id!r} is publishing its version; wait for its end.")
                if not running.cancelled:
                    running.cancelled = True
                    running.task.cancel()
                await asyncio.wait({running.task})
            job = await self._jobs.cancel(job_id)
            if job.state == "cancelled" and job.base_version is not None:
                await self._unpublish(job)  # what a crash left
            if waits and job.ended:
                self.watch.ended(job)
        self._changed.notify()
        if job.state != "cancelled":
            raise Conflict(f"Job {job_id!r} has {job.state}; a job that has ended stays as it is.")
        return job

    async def look(self) -> None:
        """Another server has written: look for what there is to do, and to stop."""
        running = self._running
        if running is not None and (await self._jobs.get(running.id)).state == "cancelled":
            self._lose(running)
        self._news.set()
        self._changed.notify()

    def _lose(self, running: _Running) -> None:
        """Stop a job that is not this server's any more; what it is about to write is refused."""
        if not (running.lost or running.cancelled or running.publishing):
            running.lost = True
            running.task.cancel()

    async def wait(self, seconds: float) -> None:
        """Return when a job's state or events have changed, or after `seconds`."""
        await wait_for(self._changed.next(), seconds)

    async def _report(self, job: TrainJob, message: str, progress: float | None = None) -> None:
        await self._jobs.add_event(job.id, message, progress)
        self._changed.notify()

    async def _loop(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                while await self._take_turn():
                    self._changed.notify()
            except Exception:  # the disk is full, the database is gone
                log.exception("The store failed; jobs go on in %g s", RETRY_SECONDS)
                await asyncio.sleep(RETRY_SECONDS)
                self._news.set()

    async def _take_turn(self) -> bool:
        while self.is_held():
            await asyncio.sleep(HELD_SECONDS)
        async with self._turn:
            return await self._run_next()

    async def _run_next(self) -> bool:
        """Run the next job. False if there is none. Raises what the store raised."""
        async with self._choosing:
            if self.draining or (job := await self._jobs.next_open()) is None:
                return False
            task = asyncio.create_task(self._run_watched(job))
            running = self._running = _Running(job.id, task)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:  # the server shuts down
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            self._running = None
        if running.cancelled:
            await self._jobs.cancel(job.id)
        elif not task.cancelled() and (error := task.exception()):
            raise error
        # What another server has ended, it has counted.
        if not running.lost and (now := await self._jobs.get(job.id)).ended:
            self.watch.ended(now)
        return True

    async def _run_watched(self, job: TrainJob) -> None:
        running = self._running
        assert running is not None
        with self.watch.running(job):
            try:
                lose = lambda: self._lose(running)  # noqa: E731
                async with self._jobs.leases.hold_for(job.policy, job.id, lose) as held:
                    running.lost = not held
                    if held:
                        await self._run_held(job)
            except (LeaseLost, JobCancelled) as error:  # of what it has left, no row speaks
                running.lost = True
                log.warning("Job %s is left to another server: %s", job.id, error)

    async def _run_held(self, job: TrainJob) -> None:
        try:
            await self._run(job)
        except LeaseLost:
            raise
        except JobCancelled:
            await self._unpublish(job)
            raise
        except ArtError as error:
            log.error("Job %s failed: %s", job.id, error)
            retryable = isinstance(error, EngineUnavailable)
            await self._failed(job, f"{type(error).__name__}: {error}", retryable=retryable)
        except OSError as error:  # no space for the adapter
            log.exception("Job %s failed", job.id)
            await self._failed(job, f"{type(error).__name__}: {error}", retryable=True)
        except Exception as error:
            log.exception("Job %s failed", job.id)
            await self._failed(job, f"internal error: {error!r}")

    @property
    def running(self) -> str | None:
        """The id of the job that runs."""
        return self._running.id if self._running is not None else None

    @property
    def is_cancelled(self) -> bool:
        """True if the job that runs was cancelled, or is another server's by now."""
        running = self._running
        return running is not None and (running.cancelled or running.lost)

    def publishes(self) -> None:
        """Let the job no longer be cancelled. Raises what it was cancelled with."""
        if self._running is not None:
            if self.is_cancelled:
                raise asyncio.CancelledError
            self._running.publishing = True
        self.watch.enter("publish")

    def publishes_not_yet(self) -> None:
        """The job goes on after all, and can be cancelled."""
        if self._running is not None:
            self._running.publishing = False

    async def _failed(self, job: TrainJob, why: str, *, retryable: bool = False) -> None:
        """End a job as failed, and delete the version that it may have published.

        A job that has succeeded stays so: its version serves, and what failed came later.
        """
        if (await self._jobs.get(job.id)).state == "succeeded":
            return
        if retryable:
            why = why.removesuffix(".")
            why = f"{why}. Send the request again with the same Idempotency-Key to try again."
        finish = self._jobs.finish(job.id, None, why, retryable=retryable)
        if self._store.shared:  # first: another server may have taken over what this one made
            await finish
            await self._unpublish(job)
            return
        try:
            await self._unpublish(job)
        finally:  # last: a client that sees the failure finds the version deleted
            await finish

    async def _unpublish(self, job: TrainJob) -> None:
        try:
            kept = await self._adapters.off_loop(self._adapters.versions, job.policy)
            for version in kept[-1:]:
                manifest = await self._adapters.off_loop(
                    self._adapters.manifest, job.policy, version
                )
                if manifest is not None and manifest["job"] == job.id:
                    await self.retention.drop(job.policy, version)
        except ArtError as error:  # it stays on disk, and its number is not used again
            log.error("%s's last version was not deleted: %s", job.policy, error)

    async def _run(self, job: TrainJob) -> None:
        while True:
            try:
                return await self._make(job)
            except VersionTaken as error:
                # By a server that woke up after it had lost the policy's lease, or by another job:
                # what no row names belongs to no version, and its name is not used again.
                log.warning("Job %s makes another version: %s", job.id, error)
                self.publishes_not_yet()
                job = await self._jobs.get(job.id)
                assert job.base_version is not None
                target = await self._adapters.off_loop(self._adapters.unused, job.policy)
                await self._jobs.begin(job.id, job.base_version, target)

    async def _make(self, job: TrainJob) -> None:
        """Make the job's version. Raises VersionTaken."""
        request, scored, target = await self._jobs.payload(job.id)
        policy = request.policy
        base = (await self._store.served())[0].get(policy)
        if base is None:
            raise NotFound(f"Policy {policy!r} was deleted before its job began.")
        if job.base_version != base or target is None:  # not begun, or rolled back since it was
            if request.retrain or isinstance(request.config, PreferenceConfig):  # by reviews?
                lineage = steps_since(await self._jobs.parents(policy), base)
                require_untrained(job.id, await self._store.reviews.marks(policy), lineage)
            target = await self._adapters.off_loop(self._adapters.unused, policy)
            await self._jobs.begin(job.id, base, target)
        await self.retention.sweep(policy, target)
        if manifest := await self._adapters.off_loop(self._adapters.manifest, policy, target):
            if manifest["job"] == job.id:
                self.publishes()
                await self._report(job, f"{policy}@{target} was published before a restart", 1.0)
                await self._finish(job, request, manifest, time.monotonic())
                return
            raise VersionTaken(f"{policy}@{target} was made by job {manifest['job']}.")
        batch = await self._batch(job, request, scored, base)
        pairs = await self._weigh(job, batch)
        if not batch.rows:
            await self._report(job, f"nothing to train on: {dict(batch.excluded)}", 1.0)
            result = TrainResult(
                policy=policy,
                version=base,
                metrics=batch.metrics,
                excluded=dict(batch.excluded),
                nodes=batch.nodes(),
            )
            await self._jobs.finish(job.id, result, None)
            return
        await self._report(job, f"training {policy}@{base} on {len(batch.rows)} rows", 0.0)
        async with self._gate():
            await self._learn(job, batch, target, pairs)

    async def _learn(
        self, job: TrainJob, batch: Batch, target: int, pairs: WeighedPairs | None
    ) -> None:
        """Make the version, check it in the sampler, publish it, and finish the job."""
        policy, base = job.policy, batch.base_version
        parent_manifest = await self._adapters.off_loop(self._adapters.check, policy, base)
        # Steps since the base: after a rollback fewer than the number of the version.
        number: int = parent_manifest.get("step", base) + 1
        kind = batch.request.config.kind
        staged = self._adapters.stage()
        step = LearnerStep(
            parent=self._adapters.path(policy, base),
            out=staged,
            step=batch.request.schedule_step or number,
            rows=batch.rows,
            config=batch.config,
            staleness=batch.metrics["staleness_mean"],
            reference=await self._reference(batch),
            fresh_optimizer=await self._new_loss(job, kind, parent_manifest),
        )

        async def on_progress(fraction: float, message: str) -> None:
            await self._report(job, message, fraction)

        parent = NamedAdapter(f"{policy}@{base}", step.parent)
        child = NamedAdapter(f"{policy}@{target}", staged)
        swap = SwapCheck(self._sampler, self._learner, batch.calls[0], parent, child)
        await self._router.load(policy, base)
        before = await swap.before()
        self.watch.enter("learn")
        try:
            async with self._device():
                metrics = await self._settled(self._learner.step(step, on_progress))
                if pairs is not None:
                    metrics |= await self._settled(pairs.metrics_after(self._learner, staged))
            self.watch.enter("check")
            begun = time.monotonic()
            sealing = asyncio.create_task(self._adapters.off_loop(self._adapters.seal, staged))
            try:
                moves = (metrics["learning_rate"], metrics["updates"])
                metrics["weight_change"] = await asyncio.to_thread(
                    check_weights, step.parent, staged, *moves
                )
                # Loaded under its final name, which clients cannot use until it is published.
                await self._sampler.load_adapter(child.name, staged, probe=False)
                # Of a step that is too long however much it is shortened, nothing is kept.
                applied = metrics["grad_norm"] if metrics.get("step_kept", 1.0) else 0.0
                metrics["probe_change"] = await swap.after(before, applied)
            finally:
                files = await sealing
            if metrics["probe_change"] == 0.0:
                await self._report(
                    job, "WARNING: the new version answers exactly as its parent did"
                )
            manifest: dict[str, Any] = {
                "policy": policy,
                "version": target,
                "parent": base,
                "step": number,
                "job": job.id,
                "kind": kind,
                "base_model": self._settings.model,
                "chat_template": self._settings.template_id,
                "metrics": metrics | batch.metrics,
                "excluded": dict(batch.excluded),
                "nodes": {name: node.model_dump() for name, node in batch.nodes().items()},
                "created_at": time.time(),
            }
            if isinstance(batch.config, TrainConfig):
                manifest["trained"] = batch.trained
                manifest["trained_calls"] = [record.id for record in batch.calls]
            else:  # these may be trained again, in each way
                manifest["imitated"] = list(dict.fromkeys(batch.trained))
            self.publishes()
            publish = self._adapters.publish
            await self._adapters.off_loop(publish, staged, policy, target, manifest, files)
        except BaseException as error:
            if isinstance(error, Exception) or self.is_cancelled:  # not if the server shuts down
                with suppress(OSError):  # a cancelled step may write there until it notices
                    await self._adapters.off_loop(self._adapters.discard, staged)
                await self._sampler.unload_adapter(child.name)  # its name may be used again
            raise
        await self._finish(job, batch.request, manifest, begun)

    async def _reference(self, batch: Batch) -> Path | None:
        """The adapter that the step's divergence is measured from; None: the base model.

        Raises:
            Damaged: its files are not what was published.
            InvalidRequest: it is not kept.
        """
        policy, version = batch.request.reference
        if not version and policy in self._router.serving:
            return None  # version 0 is the base, and its files need not be there
        kept = await self._adapters.off_loop(self._adapters.versions, policy)
        if version not in kept:
            raise InvalidRequest(
                f"got the reference {policy}@{version} of kl or distillation, expected a version "
                f"of {policy!r} that is kept: {kept}"
            )
        await self._adapters.off_loop(self._adapters.check, policy, version, ADAPTER_FILES)
        return self._adapters.path(policy, version)

    async def _new_loss(self, job: TrainJob, kind: str, parent: Mapping[str, Any]) -> bool:
        """True if the parent was made by another kind of loss than `kind`; says so if it was.

        Its Adam state then does not fit: gradients of a supervised step are several times those of
        a step by rewards, whose first updates a second moment from there would shrink to a third.
        """
        before = parent.get("kind", kind)  # version 0 has none
        if before == kind:
            return False
        message = (
            f"the optimizer begins anew: the last step's loss was {before!r}, this is {kind!r}"
        )
        await self._report(job, message, 0.0)
        return True

    async def _settled(self, work: Awaitable[T]) -> T:
        """Await the learner's work. If the job is cancelled, the learner ends it first."""
        try:
            return await work
        except asyncio.CancelledError:
            if self.is_cancelled:  # the learner may use the device until it has noticed
                await self._learner.settle()
            raise

    def _gate(self) -> AbstractAsyncContextManager[None]:
        """A context in which no calls are sampled, if sampler and learner take turns."""
        return self.gate.shut() if self._settings.take_turns else nullcontext()

    @asynccontextmanager
    async def _device(self) -> AsyncGenerator[None]:
        """Inside of `_gate`: a context in which the sampler does not use the device."""
        if not self._settings.take_turns:
            yield
            return
        await self._sampler.sleep()
        try:
            yield
        finally:
            await self._sampler.wake()

    async def _finish(
        self, job: TrainJob, request: TrainRequest, manifest: dict[str, Any], begun: float
    ) -> None:
        """Route to a published version and end the job; `begun` is when the swap began.

        `load` registers the version with the router and its final directory with the sampler,
        which reads the files again only if they are not those that it has loaded (after a
        restart of either).
        """
        policy, version = job.policy, manifest["version"]
        await self._router.load(policy, version)
        manifest["metrics"]["swap_seconds"] = time.monotonic() - begun
        checkpoint = self._adapters.checkpoint(manifest)
        result = TrainResult(
            policy=policy,
            version=version,
            metrics=checkpoint.metrics,
            excluded=manifest["excluded"],
            nodes=manifest["nodes"],
        )
        parents = await self._jobs.parents(policy)
        await self._jobs.finish(
            job.id,
            result,
            None,
            checkpoint,
            trained=manifest.get("trained", ()),
            calls=manifest.get("trained_calls", ()),
            imitated=manifest.get("imitated", ()),
            message=f"{checkpoint.name} serves",
            retrain=request.retrain,
            lineage=steps_since(parents, manifest["parent"]),
        )
        await self._router.serve(policy, version)
        self._changed.notify()
        await self._router.trim()
        other, reference = request.reference
        await self.retention.retain(policy, reference if other == policy else 0)

    async def _batch(
        self, job: TrainJob, request: TrainRequest, scored: dict[str, RewardSnapshot], base: int
    ) -> Batch:
        batch = Batch(request, base, await self._jobs.parents(request.policy))
        config = request.config
        imitates = not isinstance(config, TrainConfig)
        for ids in request.groups:
            runs, records, trained = await batch.read_group(self._store, scored, ids)
            if imitates:
                longest = self._sampler.info.max_model_len
                sampled = records
                runs, records = await demonstrations(runs, records, self._learner, longest)
                if isinstance(config, PreferenceConfig):
                    records = share_prompts(runs, records, sampled, longest)
            batch.add_group(runs, records, trained)
        batch.settle()
        if unknown := sorted(set(request.trainable) - batch.names):
            await self._report(
                job, f"no call of this batch has a name of these that `trainable` gives: {unknown}"
            )
        return batch

    async def _weigh(self, job: TrainJob, batch: Batch) -> WeighedPairs | None:
        """The pairs of a preference step, whose tokens get their weights; None: there are none."""
        if not isinstance(config := batch.request.config, PreferenceConfig):
            return None
        of = (job.policy, batch.base_version)
        await self._adapters.off_loop(self._adapters.check, *of, ADAPTER_FILES)
        parent = self._adapters.path(*of)
        await self._report(job, "comparing the pairs with the base model", 0.0)
        async with self._gate(), self._device():
            return await self._settled(weigh_pairs(batch, self._learner, parent, config.beta))
