from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic_core import from_json

from langchain_art import wire
from langchain_art.errors import Conflict, NotFound
from langchain_art_server.storage import rollout_queue as leases
from langchain_art_server.storage.rollout_queue import RolloutQueue
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import ROLLOUTS

ROLLOUT = "my_agent:rollout"


@dataclass
class Queue:
    """A queue whose clock is set by hand."""

    queue: RolloutQueue
    now: list[float]
    engine: sa.Engine
    holds: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    async def put(self, count: int, batch: str = "b", start: int = 0, **more: Any) -> None:
        names = range(start, start + count)
        rollouts = tuple(
            wire.QueuedRollout(id=f"{batch}-{n}", scenario={"q": n}, name=str(n)) for n in names
        )
        about = {"batch": batch, "rollout": ROLLOUT, "rollouts": rollouts}
        await self.queue.put(wire.RolloutBatch.model_validate(about | more))

    async def lease(
        self, worker: str, free: int, slots: int = 8, **more: Any
    ) -> list[wire.RolloutLease]:
        held = self.holds.setdefault(worker, [])
        known = {"worker": worker, "name": f"vm:{worker}", "rollout": ROLLOUT, "slots": slots}
        known |= {"free": free, "holds": tuple(held), "seconds": 60.0}
        found = await self.queue.lease(wire.LeaseRequest.model_validate(known | more))
        self.holds[worker] = [one for one in held if one not in found.lost]
        self.holds[worker] += [one.trajectory_id for one in found.leases]
        return list(found.leases)

    async def complete(self, lease: wire.RolloutLease, **more: Any) -> None:
        if "error" not in more:
            more["trajectory"] = wire.Trajectory(id=f"run-{lease.trajectory_id}", reward=1.0)
        outcome = wire.AttemptOutcome(trajectory_id=lease.trajectory_id, **more)
        await self.queue.complete(lease.id, outcome)

    async def take(self, batch: str = "b", *done: str) -> list[wire.FinishedRollout]:
        found, _ = await self.queue.take(batch, wire.TakeRequest(done=done))
        return [wire.FinishedRollout.model_validate(from_json(one)) for one in found]


@pytest.fixture
async def queue(database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Queue]:
    now = [1000.0]

    def clock(_connection: object) -> float:
        return now[0]

    monkeypatch.setattr(leases, "now_of", clock)
    store = Store(database_url)
    yield Queue(store.rollouts, now, store.engine)
    store.close()


async def test_what_is_put_up_is_leased_once_completed_and_taken(queue: Queue) -> None:
    await queue.put(3)
    await queue.put(3)  # the same again
    known = {"worker": "x", "rollout": "other:rollout", "slots": 1, "free": 1}
    found = await queue.queue.lease(wire.LeaseRequest.model_validate(known))
    assert found.leases == () and found.others == (ROLLOUT,)
    await queue.queue.give_back(wire.LeasesReturned(worker="x", leaving=True))
    first = await queue.lease("a", free=8)
    assert [(one.scenario, one.attempt) for one in first] == [({"q": n}, 1) for n in range(3)]
    assert await queue.lease("b", free=8) == []
    await queue.complete(first[1])
    await queue.complete(first[1])  # the answer was lost
    [taken] = await queue.take()
    assert taken.id == "b-1" and taken.trajectory is not None and taken.trajectory.reward == 1.0
    assert await queue.take("b", "b-1") == []
    status = await queue.queue.status("b")
    assert (status.queued, status.leased, status.finished, status.workers) == (0, 2, 0, 2)
    other = {"batch": "b", "rollout": ROLLOUT, "rollouts": ({"id": "b-0", "scenario": "another"},)}
    for batch, words in (
        (other, "with another scenario, seed or batch than before.*ids are used once"),
        (other | {"rollout": "x:y"}, "give them a batch of their own"),
    ):
        with pytest.raises(Conflict, match=words):
            await queue.queue.put(wire.RolloutBatch.model_validate(batch))


async def test_the_end_of_a_lease_by_the_servers_clock(queue: Queue) -> None:
    """Each attempt has the seed that was put up; the same rollout with another is another one."""
    seeded, plain = (
        wire.RolloutBatch.model_validate(
            {"batch": "b", "rollout": ROLLOUT, "rollouts": ({"id": "s-0", "seed": seed},)}
        )
        for seed in ('[7,"train",0,1]', None)
    )
    assert await queue.queue.put(seeded) == 1 and await queue.queue.put(seeded) == 0
    with pytest.raises(Conflict, match="with another scenario, seed or batch than before"):
        await queue.queue.put(plain)
    [first] = await queue.lease("a", free=1)
    queue.now[0] += 59
    assert await queue.lease("b", free=1) == []
    queue.now[0] += 2
    [second] = await queue.lease("b", free=1)
    assert (second.id, second.attempt) == (first.id, 2)
    assert first.seed == second.seed == '[7,"train",0,1]'
    assert second.trajectory_id != first.trajectory_id
    with pytest.raises(
        Conflict, match="whose lease has ended: the rollout is leased, at attempt 2"
    ):
        await queue.complete(first)
    await queue.complete(second)
    with pytest.raises(Conflict, match="the rollout is finished, at attempt 2"):
        await queue.complete(first)
    [taken] = await queue.take()
    assert taken.attempt == 2 and taken.trajectory is not None
    assert taken.trajectory.id == f"run-{second.trajectory_id}"
    status = await queue.queue.status("b")
    assert (status.expired, status.late) == (1, 2)


async def test_a_lease_that_is_renewed_goes_on(queue: Queue) -> None:
    """In a request of its own, or with one for more work."""
    await queue.put(2)
    [lease] = await queue.lease("a", free=1)
    [other] = await queue.lease("c", free=1)
    held = wire.LeasesHeld(worker="a", holds=(lease.trajectory_id, "gone"), seconds=60.0)
    for _ in range(4):
        queue.now[0] += 50
        assert await queue.queue.hold(held) == ["gone"]
        assert await queue.lease("c", free=1) == []
        assert await queue.lease("b", free=1) == []
    assert queue.holds["c"] == [other.trajectory_id]
    queue.now[0] += 61
    assert len(await queue.lease("b", free=2)) == 2
    assert await queue.queue.hold(held) == [lease.trajectory_id, "gone"]
    queue.now[0] += 1000
    await queue.queue.resume()  # a server that was away ends no lease
    assert await queue.lease("c", free=1, holds=()) == []


async def test_after_its_last_attempt_a_rollout_is_finished_with_its_last_error(
    queue: Queue,
) -> None:
    await queue.put(1, max_attempts=3)
    [first] = await queue.lease("a", free=1)
    await queue.complete(first, error="ValueError: no such tool")
    await queue.complete(first, error="ValueError: no such tool")  # the answer was lost
    with pytest.raises(Conflict, match="the rollout is queued, at attempt 1"):
        await queue.complete(first)
    [second] = await queue.lease("a", free=1, holds=())
    await queue.complete(first, error="ValueError: no such tool")  # and found another attempt
    with pytest.raises(Conflict, match="the rollout is leased, at attempt 2"):
        await queue.complete(first, error="another")
    status, workers = await queue.queue.status("b"), (await queue.queue.counts())[1]
    assert status.late == 2 and [(one.id, one.failed) for one in workers] == [("a", 1)]
    queue.now[0] += 61
    [third] = await queue.lease("b", free=1)
    assert [one.attempt for one in (first, second, third)] == [1, 2, 3]
    assert await queue.take() == []
    queue.now[0] += 61
    [taken] = await queue.take()
    assert taken.trajectory is None and taken.error is not None
    assert "vm:b did not renew its lease of attempt 3" in taken.error
    with pytest.raises(Conflict, match="the rollout is finished, at attempt 3"):
        await queue.complete(third)  # its run is not the one that was taken


async def test_what_is_handed_back_or_lost_on_the_way_counts_as_no_attempt(queue: Queue) -> None:
    await queue.put(2, max_attempts=1)
    first = await queue.lease("a", free=2)
    again = await queue.lease("a", free=2, holds=())  # the answer did not arrive
    assert {one.id for one in again} == {one.id for one in first}
    await queue.queue.give_back(wire.LeasesReturned(worker="a", holds=(again[0].trajectory_id,)))
    [other] = await queue.lease("b", free=2)
    assert (other.id, other.attempt) == (again[0].id, 3)
    await queue.queue.give_back(wire.LeasesReturned(worker="a", leaving=True))
    [last] = await queue.lease("b", free=2)
    assert last.id == again[1].id
    assert [one.id for one in (await queue.queue.counts())[1]] == ["b"]
    assert await queue.take() == []


async def test_a_request_that_is_late_is_of_a_worker_that_has_left(queue: Queue) -> None:
    """It was on its way when the worker drained: what it asks for is others' to lease."""
    await queue.put(1)
    await queue.queue.give_back(wire.LeasesReturned(worker="early", leaving=True))
    assert await queue.lease("early", free=1) == []  # its first
    assert len(await queue.lease("late", free=1)) == 1
    await queue.queue.give_back(wire.LeasesReturned(worker="late", leaving=True))
    assert await queue.lease("late", free=1) == []
    assert (await queue.queue.counts())[1] == ()
    status = await queue.queue.status("b")
    assert (status.queued, status.leased, status.workers) == (1, 0, 0)
    assert len(await queue.lease("other", free=1)) == 1


async def test_workers_get_shares_by_their_slots_and_what_they_have(queue: Queue) -> None:
    for worker, slots in (("a", 8), ("b", 4)):
        assert await queue.lease(worker, free=slots, slots=slots) == []
    await queue.put(6)
    assert len(await queue.lease("a", free=8, slots=8)) == 4
    assert len(await queue.lease("b", free=4, slots=4)) == 2
    await queue.put(6, start=6)
    assert len(await queue.lease("b", free=2, slots=4)) == 2
    assert len(await queue.lease("a", free=4, slots=8)) == 4


async def test_a_worker_that_does_not_come_for_its_share_keeps_nothing_waiting(
    queue: Queue,
) -> None:
    await queue.lease("a", free=8)
    await queue.put(4)
    assert [len(await queue.lease("b", free=free)) for free in (8, 6, 5, 4)] == [2, 1, 1, 0]
    queue.now[0] += 46  # and one that was not heard for long takes none
    await queue.put(4, start=4)
    assert (await queue.queue.status("b")).workers == 0
    assert len(await queue.lease("a", free=8)) == 4


async def test_a_batch_is_cancelled_or_forgotten_and_its_ends_are_refused(queue: Queue) -> None:
    await queue.put(1)
    [lease] = await queue.lease("a", free=1)
    await queue.queue.cancel("b")
    with pytest.raises(NotFound, match="its batch was cancelled"):
        await queue.complete(lease)
    assert await queue.queue.hold(wire.LeasesHeld(worker="a", holds=(lease.trajectory_id,))) == [
        lease.trajectory_id
    ]
    await queue.put(1, batch="other")
    queue.now[0] += 601
    assert await queue.lease("a", free=1) == []
    with pytest.raises(NotFound, match="nobody asked for it for 600 s"):
        await queue.queue.status("other")


async def test_a_damaged_rollout_ends_as_one_that_failed_and_says_why(queue: Queue) -> None:
    await queue.put(3)
    for lease in await queue.lease("a", free=3):
        await queue.complete(lease)
    with queue.engine.begin() as connection:
        connection.execute(
            sa.update(ROLLOUTS).where(ROLLOUTS.c.id == "b-1").values(trajectory=b"x")
        )
    first, damaged, last = await queue.take()
    assert first.trajectory is not None and last.trajectory is not None
    assert damaged.id == "b-1" and damaged.trajectory is None
    assert damaged.error is not None and "in the database is damaged" in damaged.error
    assert await queue.take("b", "b-0", "b-1", "b-2") == []
