"""Retention and deletions keep what is needed, and nothing else over the limit, in any order.

Needed is: the version that serves, pinned ones, what a job that has not ended measures from (as a
KL penalty's reference or as a teacher, of its own policy or of another), and what a job that was
begun starts from. Retention keeps the first one, too, and what the last step measured from.
"""

import asyncio
import tempfile
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from langchain_art.errors import Conflict, InvalidRequest, NotFound
from langchain_art.wire import (
    Distillation,
    KLPenalty,
    LoraConfig,
    TrainConfig,
    TrainRequest,
    TrainResult,
)
from langchain_art_server.config import Settings
from langchain_art_server.gateway.policies import Policies
from langchain_art_server.jobs.job_runner import JobRunner
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.policies.router import Router
from langchain_art_server.storage.store import Store
from tests.support.soak import count

NAMES = ("one", "two")
#: Files in memory, where there are such: each example flushes hundreds.
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
REFUSED = (Conflict, InvalidRequest, NotFound)


@dataclass
class OpenJob:
    """A job that has not ended, as the reference model knows it."""

    id: str
    request: TrainRequest
    measures: tuple[str, int]
    base: int | None = None
    target: int | None = None
    made: Any = None
    """Its version, published by a server that was killed before it ended the job."""


class Engine:
    """Loads whatever it is told: nothing here is sampled."""

    async def load_adapter(self, _name: str, _path: Path, **_: bool) -> None: ...

    async def unload_adapter(self, _name: str) -> None: ...


class Kept:
    """The server's own parts, and beside them what they should hold."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.keep = keep
        known = Settings(model="none", data_dir=folder, keep_checkpoints=keep)
        engine = cast("Any", Engine())
        self.store, self.adapters = Store(known.url), AdapterStore(folder / "adapters")
        self.router = Router("none", self.adapters, engine)
        parts = (known, self.store, self.adapters, self.router)
        self.jobs = JobRunner(*parts, engine, engine)
        health = cast("Any", SimpleNamespace(require_space=lambda: None))
        self.policies = Policies(*parts, self.jobs, engine, engine, health)
        self.versions: dict[str, set[int]] = {}
        self.pinned: set[tuple[str, int]] = set()
        self.serving: dict[str, int] = {}
        self.open: list[OpenJob] = []
        self.used: defaultdict[str, int] = defaultdict(lambda: -1)
        self._added = 0

    async def make(self, policy: str) -> None:
        if policy not in self.versions:
            await self.store.add_checkpoint(self._publish(policy, 0, None, "none"))
            await self.router.serve(policy, 0)
            await self.store.add_policy(policy, LoraConfig())
            self.versions[policy], self.serving[policy] = {0}, 0

    def _publish(self, policy: str, number: int, parent: int | None, job: str) -> Any:
        staged = self.adapters.stage()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (staged / name).write_text(f"{policy}@{number}")
        about = {"policy": policy, "version": number, "parent": parent, "job": job}
        about |= {"created_at": 1.0, "metrics": {}}
        self.adapters.publish(staged, policy, number, about)
        assert not number or number > self.used[policy], "a name is used once"
        self.used[policy] = max(self.used[policy], number)
        return self.adapters.checkpoint(about)

    async def queue(self, policy: str, teacher: str, number: int) -> None:
        """A job that measures from a version, which may not be kept."""
        if policy not in self.versions:
            return
        if teacher == policy:
            config = TrainConfig(kl=KLPenalty(coefficient=0.1, estimator="k3", reference=number))
        else:
            config = TrainConfig(distillation=Distillation(teacher=f"{teacher}@{number}"))
        self._added += 1
        request = TrainRequest(policy=policy, groups=(("run",),), config=config)
        job = OpenJob(f"job-{self._added}", request, (teacher, number))
        is_kept = not number or number in self.versions.get(teacher, ())
        try:
            await self.store.jobs.add(job.id, job.id, request, [], 99)
        except InvalidRequest:
            assert not is_kept
        else:
            assert is_kept, "the job could never be done"
            self.open.append(job)

    async def begin(self) -> None:
        """What the server runs next."""
        for job in self.open[:1]:
            if job.base is None:
                policy = job.request.policy
                job.base, job.target = self.router.serving[policy], self.adapters.unused(policy)
                await self.store.jobs.begin(job.id, job.base, job.target)

    async def publish(self) -> None:
        await self.begin()
        for job in self.open[:1]:
            if job.made is None and job.target is not None:
                job.made = self._publish(job.request.policy, job.target, job.base, job.id)

    async def finish(self) -> None:
        await self.publish()
        for job in self.open[:1]:
            policy, target = job.request.policy, job.target
            assert target is not None
            assert job.measures[1] == 0 or self.adapters.is_whole(*job.measures)
            result = TrainResult(policy=policy, version=target, metrics={}, excluded={}, nodes={})
            await self.store.jobs.finish(job.id, result, None, job.made)
            await self.router.serve(policy, target)
            self.open.remove(job)
            self.serving[policy] = target
            self.versions[policy].add(target)
            reference = job.measures[1] if job.measures[0] == policy else 0
            await self.jobs.retention.retain(policy, reference)
            free = sorted(self.versions[policy] - self.needed(policy) - {0, reference})
            self.versions[policy] -= set(free[: max(0, len(free) - self.keep)])

    async def cancel(self, index: int) -> None:
        if self.open:
            job = self.open.pop(index % len(self.open))
            await self.jobs.cancel(job.id)

    async def pin(self, policy: str, number: int, *, pinned: bool) -> None:
        with suppress(NotFound):
            await self.policies.set_pinned(policy, number, pinned)
            (self.pinned.add if pinned else self.pinned.discard)((policy, number))

    async def roll_back(self, policy: str, number: int) -> None:
        with suppress(NotFound):
            await self.policies.rollback(policy, number)
            self.serving[policy] = number

    async def delete(self, policy: str, number: int) -> None:
        mine = self.versions.get(policy, set())
        needed = self.needed(policy) if policy in self.versions else set[int]()
        try:
            await self.policies.delete_version(policy, number)
        except REFUSED:
            assert number not in mine or number in needed
        else:
            assert number in mine - needed
            mine.discard(number)

    async def delete_policy(self, policy: str) -> None:
        uses = any(
            job.request.policy == policy or (job.measures[0] == policy and job.measures[1])
            for job in self.open
        )
        try:
            await self.policies.delete(policy)
        except REFUSED:
            assert uses or policy not in self.versions
        else:
            assert not uses
            del self.versions[policy], self.serving[policy]
            self.pinned = {one for one in self.pinned if one[0] != policy}

    def needed(self, policy: str) -> set[int]:
        begun = {j.base for j in self.open if j.request.policy == policy and j.base is not None}
        pins = {number for name, number in self.pinned if name == policy}
        measured = {number for name, number in (j.measures for j in self.open) if name == policy}
        return {self.serving[policy]} | pins | (measured - {0}) | begun

    async def check(self) -> None:
        for policy in NAMES:
            expected = self.versions.get(policy, set())
            named = {one.version for one in await self.store.checkpoints(policy)}
            made = {j.target for j in self.open if j.made and j.request.policy == policy}
            assert named == expected, policy
            assert set(self.adapters.versions(policy)) == expected | made, policy
            assert all(self.adapters.is_whole(policy, number) for number in expected)
            if expected:
                assert self.needed(policy) <= expected


numbers = st.integers(0, 9)
STEP: list[Any] = [("queue", "one", "one", 0), ("finish",)]
names = st.sampled_from(NAMES)
ACTIONS = st.one_of(
    st.tuples(st.just("make"), names),
    st.tuples(st.just("queue"), names, names, numbers),
    st.tuples(st.just("queue"), names, names, numbers),
    st.tuples(st.just("begin")),
    st.tuples(st.just("publish")),
    st.tuples(st.just("finish")),
    st.tuples(st.just("finish")),
    st.tuples(st.just("cancel"), numbers),
    st.tuples(st.just("pin"), names, numbers),
    st.tuples(st.just("unpin"), names, numbers),
    st.tuples(st.just("roll_back"), names, numbers),
    st.tuples(st.just("delete"), names, numbers),
    st.tuples(st.just("delete_policy"), names),
)


@pytest.mark.soak
@pytest.mark.timeout(count(300, 7200))
@settings(max_examples=count(8, 3000))
@example(1, [*STEP, *STEP, *STEP])
@example(3, [*STEP, *STEP, ("queue", "one", "one", 1), ("delete", "one", 1)])
@example(3, [*STEP, *STEP, ("queue", "two", "one", 1), ("delete_policy", "one")])
@example(3, [*STEP, *STEP, STEP[0], ("begin",), ("roll_back", "one", 1), ("delete", "one", 2)])
@example(3, [("queue", "one", "one", 7)])
@example(3, [*STEP, STEP[0], ("publish",), ("cancel", 0)])
@given(st.integers(1, 3), st.lists(ACTIONS, min_size=8, max_size=40))
def test_what_is_needed_is_kept_and_the_rest_is_not(keep: int, actions: list[Any]) -> None:
    async def run(folder: Path) -> None:
        kept = Kept(folder, keep)
        try:
            for name in NAMES:
                await kept.make(name)
            for name, *arguments in actions:
                if name in ("pin", "unpin"):
                    await kept.pin(*arguments, pinned=name == "pin")
                else:
                    await getattr(kept, name)(*arguments)
                await kept.check()
        finally:
            kept.store.close()

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        asyncio.run(run(Path(folder)))
