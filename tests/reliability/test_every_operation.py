"""A crash, and an error, at every operation of a step: published whole once, or not at all.

The operations are those on files of adapters and manifests, and the database's transactions; what
is inside of a transaction is SQLite's own.
"""

import asyncio
import errno
import math
import os
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
import sqlalchemy as sa

from langchain_art_server.gateway.refusals import answer
from langchain_art_server.gateway.service import Service
from langchain_art_server.jobs import job_runner
from langchain_art_server.storage.tables import CHECKPOINTS, TRAINED
from tests.support.operations import Mode, Operations
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.stored_step import (
    DATABASE,
    FORMER,
    STEPS,
    Crash,
    Steps,
    ended,
    learned,
    steps,
    submit,
)


class Truth(NamedTuple):
    """The operations of the undisturbed steps, and the learned files of their versions."""

    operations: list[str]
    versions: list[list[bytes]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(
    data: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Steps, Truth]]:
    """Steps, and what they are without a crash and an error."""
    with pytest.MonkeyPatch.context() as patch:
        async with steps(data, tmp_path_factory.mktemp("steps"), patch) as made:
            yield made, await undisturbed(made)


async def undisturbed(made: Steps) -> Truth:
    place = made.copy()
    async with made.service(place) as service:
        with Operations(place, DATABASE) as operations:
            made.operations = operations
            assert (await ended(service, await submit(service, 0))).state == "succeeded"
            await settled(service)
            made.operations = None
        assert (await ended(service, await submit(service, 1))).state == "succeeded"
    return Truth(operations.names, [learned(place, 3), learned(place, 4)])


async def settled(service: Service) -> None:
    """A job has ended; now its retention has, too."""
    async with service.store.leases.here("tiny"):
        pass


async def check(service: Service, data: Path, truth: Truth) -> list[int]:
    """Both steps are made once, bit for bit; nothing torn is visible, nothing needless is kept."""
    versions: list[int] = []
    for step in range(2):
        job = await ended(service, await submit(service, step))
        if job.state == "failed" and job.retryable:
            job = await ended(service, await submit(service, step))
        assert job.state == "succeeded" and job.result is not None, job
        versions.append(job.result.version)
    await settled(service)
    first, second = versions
    assert [learned(data, one) for one in versions] == truth.versions
    assert service.router.serving == {"tiny": second}
    adapters = service.adapters
    assert all(adapters.is_whole("tiny", version) for version in adapters.versions("tiny"))

    def read(connection: sa.Connection) -> tuple[set[int], list[str]]:
        rows = connection.scalars(sa.select(TRAINED.c.trajectory_id))
        return set(connection.scalars(sa.select(CHECKPOINTS.c.version))), list(rows)

    named, trained = await service.store.read(read)
    assert set(adapters.versions("tiny")) == named == {0, first, second}
    assert sorted(trained) == sorted(run for runs in (*FORMER, *STEPS) for run in runs)
    assert adapters.unused("tiny") == second + 1
    return versions


async def crash(made: Steps, at: int, places: dict[Mode, Path]) -> None:
    """A step whose machine stops before operation `at`; writes what it may leave to `places`."""
    place, stopped = made.copy(), asyncio.Event()
    loop = asyncio.get_running_loop()
    async with made.service(place) as service:
        with Operations(place, DATABASE) as operations:

            def stop(number: int, _name: str) -> None:
                if number >= at:
                    loop.call_soon_threadsafe(stopped.set)
                    raise Crash

            operations.before, made.operations = stop, operations
            with suppress(Crash):
                await submit(service, 0)
                last = asyncio.create_task(done_or(service, stopped))
                await asyncio.wait_for(last, 60)
            running = service.jobs._task
            assert running is not None
            running.cancel()
            await asyncio.wait({running})
            for mode, target in places.items():
                operations.after_crash(target, mode, random.Random(f"{at} {mode}"))
    shutil.rmtree(place)


async def done_or(service: Service, stopped: asyncio.Event) -> None:
    """The job has ended, with its retention, or the machine has stopped."""
    while not stopped.is_set() and (await service.store.jobs.next_open()) is not None:
        await asyncio.sleep(0.005)
    if not stopped.is_set():
        await asyncio.wait({asyncio.create_task(settled(service))}, timeout=1)


#: What a crash leaves of what was not flushed; so many at each operation, in turn.
LEFT: tuple[Mode, ...] = ("drop", "tear", "reorder", "keep")
MODES = count(1, len(LEFT))
#: Of the operations before which the machine stops.
STRIDE = 6 // count(1, 6)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_crash_at_any_operation_of_a_step(engines: tuple[Steps, Truth]) -> None:
    made, truth = engines
    assert len(truth.operations) > 20
    for at in range(STRIDE, len(truth.operations) + 2, STRIDE):
        modes: list[Mode] = [LEFT[(at + more) % len(LEFT)] for more in range(MODES)]
        places: dict[Mode, Path] = {mode: made.free_place() for mode in modes}
        await crash(made, at, places)
        for mode, place in places.items():
            print(mode, "before", [*truth.operations, "nothing more"][at - 1])  # noqa: T201
            async with made.service(place) as service:
                assert await check(service, place, truth) == [3, 4]
            shutil.rmtree(place)


class Disk:
    """Fails at operation `at`, and at so many after it, until it is mended.

    A step does two or three transactions more or less, by how often its progress is written.
    """

    def __init__(self, at: int, number: int, more: float) -> None:
        self._at, self._number, self._more = at, number, more
        self.mended, self.failed, self.reached = False, False, False

    def before(self, number: int, _name: str) -> None:
        self.reached = self.reached or number >= self._at
        if not self.mended and self._at <= number <= self._at + self._more:
            self.failed = True
            raise OSError(self._number, os.strerror(self._number))


#: Operations that fail after the first one: the second may be the one that undoes what was done.
MORE = (0, 1, math.inf)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_an_error_at_any_operation_of_a_step(
    engines: tuple[Steps, Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full, or fails: 503 and retryable, reads go on, and it goes on by itself."""
    monkeypatch.setattr(job_runner, "RETRY_SECONDS", 0.02)
    draw, (made, truth) = random.Random(drawn_seed()), engines
    cases = [(at, more) for at in range(1, len(truth.operations)) for more in MORE]
    for at, more in draw.sample(cases, count(5, len(cases))):
        number = draw.choice([errno.ENOSPC, errno.EIO])
        place, disk = made.copy(), Disk(at, number, more)
        async with made.service(place) as service:
            with Operations(place, DATABASE) as operations:
                operations.before, made.operations = disk.before, operations
                print(os.strerror(number), more, truth.operations[at - 1])  # noqa: T201 - if it fails
                await disturbed(service, disk)
                disk.mended = True
                await check(service, place, truth)
        shutil.rmtree(place)


async def disturbed(service: Service, disk: Disk) -> None:
    """A step on a disk that fails: what is refused is refused so that it is sent again."""
    try:
        job = await submit(service, 0)
    except Exception as error:  # noqa: BLE001 - answered as the gateway does
        response = answer(error, "/v1/train")
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0, error
    else:
        while not disk.failed and not (await service.store.jobs.get(job.id)).ended:
            await asyncio.sleep(0.005)
        if not disk.failed:
            await settled(service)  # it is in its retention
        job = await service.store.jobs.get(job.id)
        assert job.state != "failed" or job.retryable, job
    assert disk.failed == disk.reached
    assert await service.store.trajectories([STEPS[0][0]])
    assert await service.policies.get("tiny")
    served = service.router.serving["tiny"]
    assert service.adapters.archive("tiny", served)
    assert served in {2, 3}
