"""The queue against a small model: whatever workers do, each rollout has one trajectory at most."""

import asyncio
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pydantic_core import from_json

from langchain_art import wire
from langchain_art.errors import Conflict
from langchain_art_server.storage import rollout_queue as leases
from langchain_art_server.storage.store import Store
from tests.support.soak import count

WORKERS = st.sampled_from(("a", "b", "c"))
SECONDS, MOST = 10.0, 2


@dataclass
class Attempt:
    """A lease that was given out, as the model knows it."""

    lease: wire.RolloutLease
    worker: str
    until: float
    over: bool = False


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(f"sqlite:///{Path(self.folder.name) / 'art.sqlite3'}")
        self.queue = self.store.rollouts
        self.now, self.put_up = 1000.0, 0
        self.given: list[Attempt] = []
        self.failures = Counter[str]()
        self.ended: dict[str, str] = {}  # rollout -> trajectory that was acknowledged
        self.taken: dict[str, wire.FinishedRollout] = {}
        self.patch = pytest.MonkeyPatch()

        def clock(_connection: object) -> float:
            return self.now

        self.patch.setattr(leases, "now_of", clock)

    def teardown(self) -> None:
        self.patch.undo()
        self.store.close()
        self.folder.cleanup()

    def holds(self, worker: str) -> list[Attempt]:
        return [one for one in self.given if one.worker == worker and not one.over]

    def expire(self) -> None:
        for one in self.given:
            if not one.over and one.until < self.now:
                one.over = True
                self.failures[one.lease.id] += 1

    @initialize()
    def begin(self) -> None:
        self.put(2)

    @precondition(lambda self: self.put_up < 4)
    @rule(count=st.integers(1, 2))
    def put(self, count: int) -> None:
        new = range(self.put_up, self.put_up + count)
        rollouts = tuple(wire.QueuedRollout(id=f"r-{n}", scenario=n) for n in new)
        batch = wire.RolloutBatch(batch="b", rollout="m:f", rollouts=rollouts, max_attempts=MOST)
        assert asyncio.run(self.queue.put(batch)) == count
        self.put_up += count

    @rule(
        worker=WORKERS, free=st.integers(0, 3), arrives=st.sampled_from((True, True, True, False))
    )
    def lease(self, worker: str, free: int, arrives: bool) -> None:
        self.expire()
        mine = self.holds(worker)
        known: dict[str, Any] = {"worker": worker, "rollout": "m:f", "slots": 4, "free": free}
        known |= {"holds": tuple(one.lease.trajectory_id for one in mine), "seconds": SECONDS}
        found = asyncio.run(self.queue.lease(wire.LeaseRequest.model_validate(known)))
        assert not found.lost and len(found.leases) <= free
        for one in mine:
            if one.until - self.now <= SECONDS / 2:
                one.until = self.now + SECONDS
        held = {one.lease.id for one in self.given if not one.over}
        for lease in found.leases:
            assert lease.id not in held and lease.id not in self.ended
            assert lease.attempt == 1 + max(
                (one.lease.attempt for one in self.given if one.lease.id == lease.id), default=0
            )
            attempt = Attempt(lease, worker, self.now + SECONDS)
            self.given.append(attempt)
            if not arrives:  # the next request of this worker gives it back
                known["holds"], known["free"] = tuple(o.lease.trajectory_id for o in mine), 0
                attempt.over = True
        if not arrives:
            asyncio.run(self.queue.lease(wire.LeaseRequest.model_validate(known)))

    @rule(pick=st.integers(0, 3), fails=st.booleans())
    def complete(self, pick: int, fails: bool) -> None:
        if not self.given:
            return
        some = self.given[-4:]
        one = some[pick % len(some)]
        id_ = one.lease.trajectory_id
        more: dict[str, Any] = {"error": "no"} if fails else {"trajectory": wire.Trajectory(id=id_)}
        done = self.queue.complete(one.lease.id, wire.AttemptOutcome(trajectory_id=id_, **more))
        if self.ended.get(one.lease.id) == id_ or one.lease.id in self.taken:
            done.close()
            return
        try:
            asyncio.run(done)
        except Conflict:
            # Only what the server may have given to others; never a lease in its time.
            assert one.over or one.until < self.now
            return
        if one.over:
            assert fails  # that it failed is known, and changes nothing
            return
        one.over = True
        self.failures[one.lease.id] += fails
        if not fails:
            assert one.lease.id not in self.ended
            self.ended[one.lease.id] = id_

    @rule(worker=WORKERS, fails=st.booleans())
    def lease_and_complete(self, worker: str, fails: bool) -> None:
        self.lease(worker, 2, True)
        self.complete(0, fails)

    @rule(worker=WORKERS)
    def lease_and_be_late(self, worker: str) -> None:
        self.lease(worker, 2, True)
        self.wait(SECONDS + 1)

    @rule(seconds=st.sampled_from((4.0, SECONDS + 1)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        if not self.put_up:
            return
        asked = wire.TakeRequest(done=tuple(self.taken))
        found, _ = asyncio.run(self.queue.take("b", asked))
        self.expire()
        for text in found:
            one = wire.FinishedRollout.model_validate(from_json(text))
            assert one.id not in self.taken
            self.taken[one.id] = one
            if one.trajectory is None:
                assert self.failures[one.id] == MOST and one.id not in self.ended
            else:
                assert self.ended[one.id] == one.trajectory.id

    @invariant()
    def nothing_is_lost(self) -> None:
        if self.put_up:
            status = asyncio.run(self.queue.status("b"))
            known = status.queued + status.leased + status.finished
            assert self.put_up - len(self.taken) <= known <= self.put_up


TestQueue = QueueMachine.TestCase
pytest.mark.soak(TestQueue)
TestQueue.settings = settings(max_examples=count(6, 500), stateful_step_count=25, deadline=None)
