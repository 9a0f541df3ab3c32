import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from langchain_art import wire
from langchain_art_server.gateway import app as gateway
from langchain_art_server.gateway import lists, record_routes
from langchain_art_server.gateway.lists import page_turns
from langchain_art_server.storage.queries import Page
from langchain_art_server.storage.store import Store

POLLS, SECONDS = 100, 2.0


class Polled:
    """The routes that wait, over a real store, whose looks are counted."""

    def __init__(self, store: Store) -> None:
        self.store, self.looks = store, 0
        service = SimpleNamespace(store=store, is_stopping=lambda: False, jobs=self)
        self._app = FastAPI()
        record_routes.rollout_routes(self._app, service)  # pyright: ignore[reportArgumentType]
        gateway.job_routes(self._app, service)  # pyright: ignore[reportArgumentType]

    async def wait(self, seconds: float) -> None:
        """As the queue of jobs, of which none changes."""
        await asyncio.sleep(min(seconds, 0.02))

    def count(self, monkeypatch: pytest.MonkeyPatch, room: object, name: str) -> None:
        """Count the calls of a method that reads the database."""
        read = getattr(room, name)

        async def counted(*args: Any) -> Any:
            self.looks += 1
            return await read(*args)

        monkeypatch.setattr(room, name, counted)

    def client(self, address: str) -> httpx.AsyncClient:
        front = httpx.ASGITransport(self._app, client=(address, 1))
        return httpx.AsyncClient(transport=front, base_url="http://localhost")


@pytest.fixture
async def polled(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Polled]:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('polls')}/art.db")
    one = wire.QueuedRollout(id="b-0", scenario={}, name="0")
    await store.rollouts.put(wire.RolloutBatch(batch="b", rollout="other", rollouts=(one,)))
    yield Polled(store)
    store.close()


LEASE = {"worker": "w", "name": "w", "rollout": "r", "slots": 1, "free": 1, "seconds": 60.0}
TAKE, LEASES = "/v1/rollouts/batches/b/take", "/v1/rollouts/lease"


async def test_the_looks_of_one_client_at_a_batch_have_a_rate_and_leave_time_for_others(
    polled: Polled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_routes, "LOOK_SECONDS", 0.02)
    polled.count(monkeypatch, polled.store.rollouts, "finished")
    async with polled.client("1.1.1.1") as many, polled.client("2.2.2.2") as other:
        waits = [
            asyncio.create_task(many.post(TAKE, json={"wait": SECONDS}, timeout=60))
            for _ in range(POLLS)
        ]
        await asyncio.sleep(SECONDS / 2)
        late = asyncio.create_task(other.post(TAKE, json={"wait": 30.0}, timeout=60))
        asked = wire.LeaseRequest.model_validate(LEASE | {"rollout": "other"})
        [lease] = (await polled.store.rollouts.lease(asked)).leases
        run = wire.Trajectory(id=lease.trajectory_id, reward=1.0)
        whole = wire.AttemptOutcome(trajectory_id=run.id, trajectory=run)
        before = polled.looks
        await polled.store.rollouts.complete("b-0", whole)
        assert (await late).status_code == 200
        # It waits for a few of those looks, not for all of them.
        assert polled.looks - before < POLLS
        assert {(await one).status_code for one in waits} == {200}
    assert polled.looks <= POLLS + 1.5 * lists.LOOKS_PER_SECOND * SECONDS


async def test_the_looks_of_one_clients_workers_have_a_rate(
    polled: Polled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_routes, "LOOK_SECONDS", 0.02)
    polled.count(monkeypatch, polled.store.rollouts, "is_due")
    async with polled.client("1.1.1.1") as many:
        # Each writes once before its first look: of many, a busy machine spends the wait on that.
        asked = [LEASE | {"worker": f"w{n}", "wait": SECONDS} for n in range(POLLS // 4)]
        times = 0
        while not polled.looks:  # on a busy machine a wait may be over before its first look
            answers = await asyncio.gather(
                *(many.post(LEASES, json=one, timeout=60) for one in asked)
            )
            assert {one.status_code for one in answers} == {200}
            times += 1
    assert polled.looks <= 1.5 * lists.LOOKS_PER_SECOND * SECONDS * times


async def test_the_looks_at_a_job_have_a_rate(
    polled: Polled, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = wire.TrainRequest(policy="p", groups=(("t",),))
    await polled.store.jobs.add("j", "k", request, [], 9)
    polled.count(monkeypatch, polled.store.jobs, "get")
    async with polled.client("1.1.1.1") as many:
        asked = [f"/v1/jobs/j{path}?wait={SECONDS}" for path in ("", "/events")] * (POLLS // 2)
        answers = await asyncio.gather(*(many.get(one, timeout=60) for one in asked))
    assert {one.status_code for one in answers} == {200}
    assert POLLS <= polled.looks <= POLLS + 1.5 * lists.LOOKS_PER_SECOND * SECONDS


PART = lists._READ_PER_SECOND // 20  # 50 ms


async def test_a_client_gets_one_page_at_a_time_and_then_waits_for_its_bytes() -> None:
    turns, clock = page_turns(), asyncio.get_running_loop().time
    began: dict[str, list[float]] = {"a": [], "b": []}
    running = dict.fromkeys(began, 0)

    def read(client: str) -> Callable[[], Awaitable[Page[bytes]]]:
        async def page() -> Page[bytes]:
            began[client].append(clock())
            running[client] += 1
            assert running[client] == 1
            await asyncio.sleep(0.01)
            running[client] -= 1
            return Page([b"x" * PART], None, False)

        return page

    await asyncio.gather(*(turns.take(one, read(one)) for one in "aaabaaa"))
    apart = [later - earlier for earlier, later in zip(began["a"], began["a"][1:], strict=False)]
    assert len(apart) == 5 and min(apart) >= 0.049
    assert began["b"][0] - began["a"][0] < 0.04
    assert not turns._reading
