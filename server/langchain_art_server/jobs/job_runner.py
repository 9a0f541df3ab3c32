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
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from langchain_art.errors import ArtError, InvalidRequest, NotFound
from langchain_art.wire import PreferenceConfig, TrainConfig, TrainJob, TrainRequest, TrainResult
from langchain_art_server.backends.base import LearnerStep, Sampler
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.config import Settings
from langchain_art_server.jobs.batch_builder import Batch
from langchain_art_server.jobs.eligibility import steps_since
from langchain_art_server.jobs.job_queue import AdmissionGate, JobQueue
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
from langchain_art_server.storage.reward_snapshot import RewardSnapshot
from langchain_art_server.storage.store import Store
from langchain_art_server.telemetry.metrics import JobWatch

log = logging.getLogger(__name__)
T = TypeVar("T")


class JobRunner(JobQueue):
    """Does the jobs of its queue."""

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
        super().__init__(store.jobs, beside, watch)
        self._settings, self._store, self._adapters = settings, store, adapters
        self._router, self._sampler, self._learner = router, sampler, learner
        self.retention = Retention(store, adapters, router, settings.keep_checkpoints)
        self.gate = beside.gate if beside else AdmissionGate(settings.max_waiting_calls)

    async def _failed(self, job: TrainJob, why: str, *, retryable: bool = False) -> None:
        """End a job as failed, and delete the version that it may have published.

        A job that has succeeded stays so: its version serves, and what failed came later.
        """
        if (await self._store.jobs.get(job.id)).state == "succeeded":
            return
        if retryable:
            why = why.removesuffix(".")
            why = f"{why}. Send the request again with the same Idempotency-Key to try again."
        finish = self._store.jobs.finish(job.id, None, why, retryable=retryable)
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
                job = await self._store.jobs.get(job.id)
                assert job.base_version is not None
                target = await self._adapters.off_loop(self._adapters.unused, job.policy)
                await self._store.jobs.begin(job.id, job.base_version, target)

    async def _make(self, job: TrainJob) -> None:
        """Make the job's version. Raises VersionTaken."""
        request, scored, target = await self._store.jobs.payload(job.id)
        policy = request.policy
        base = (await self._store.served())[0].get(policy)
        if base is None:
            raise NotFound(f"Policy {policy!r} was deleted before its job began.")
        if job.base_version != base or target is None:  # not begun, or rolled back since it was
            if request.retrain or isinstance(request.config, PreferenceConfig):  # by reviews?
                lineage = steps_since(await self._store.jobs.parents(policy), base)
                require_untrained(job.id, await self._store.reviews.marks(policy), lineage)
            target = await self._adapters.off_loop(self._adapters.unused, policy)
            await self._store.jobs.begin(job.id, base, target)
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
            await self._store.jobs.finish(job.id, result, None)
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
        parents = await self._store.jobs.parents(policy)
        await self._store.jobs.finish(
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
        batch = Batch(request, base, await self._store.jobs.parents(request.policy))
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
