import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from langchain_art.errors import ConfigError
from langchain_art.wire import LoraConfig, TrainRequest, Trajectory
from langchain_art_server.storage import fleet, schema
from langchain_art_server.storage.database import lock_data_dir
from langchain_art_server.storage.fleet import LeaseLost, begin_call
from langchain_art_server.storage.store import Store
from tests.support.postgres import Postgres

REQUEST = TrainRequest(policy="p", groups=(("t-1",),))


@pytest.fixture
def url(postgres: Postgres) -> str:
    return postgres.database()


@pytest.fixture
def stores(url: str) -> Iterator[tuple[Store, Store]]:
    made = Store(url, shared=True), Store(url, shared=True)
    yield made
    for store in made:
        store.close()


async def test_what_another_server_has_is_not_waited_for(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SKIP LOCKED: one that stopped while it held the row keeps nobody."""
    one, other = stores
    monkeypatch.setattr(fleet, "LEASE_SECONDS", 0.0)
    assert await one.leases.take("p")
    with one.engine.begin() as connection:
        assert one.leases.holds(connection, "p")
        async with asyncio.timeout(30):
            assert not await other.leases.take("p")
    assert await other.leases.take("p")


async def test_a_server_that_slept_writes_nothing(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = stores
    await one.jobs.add("job-1", "k", REQUEST, [], 9)
    assert await one.leases.take("p", "job-1")
    await one.add_policy("p", LoraConfig())
    await one.jobs.begin("job-1", 0, 1)
    assert await other.jobs.next_open() is None, "another server has the policy"
    monkeypatch.setattr(fleet, "LEASE_SECONDS", 0.0)
    assert await one.leases.renew("p")  # which ends now
    monkeypatch.setattr(fleet, "LEASE_SECONDS", 60.0)
    found = await other.jobs.next_open()
    assert found is not None and found.id == "job-1"
    assert await other.leases.take("p", "job-1")
    for is_held in (True, False):
        for write in (
            one.jobs.begin("job-1", 0, 1),
            one.jobs.finish("job-1", None, "it failed"),
            one.roll_back("p", 1, ""),
            one.delete_policy("p"),
            one.add_policy("p", LoraConfig()),
        ):
            with pytest.raises(LeaseLost, match="'p'"):
                await write
        await one.jobs.add_event("job-1", "half", 0.5)
        if is_held:  # one who has given it back writes nothing, too
            await one.leases.release("p")
    assert (await one.jobs.events("job-1", 0, 9)).items == []
    await other.jobs.finish("job-1", None, None)
    assert (await one.jobs.get("job-1")).state == "succeeded"
    assert not await one.leases.take("p", "job-1"), "it has ended"


async def test_what_is_sent_to_both_at_once_is_stored_once(stores: tuple[Store, Store]) -> None:
    runs = [Trajectory(id=f"t-{number}", reward=1.0) for number in range(20)]
    stored = await asyncio.gather(
        *(store.add_trajectories([run]) for run in runs for store in stores)
    )
    assert sum(stored) == len(runs)
    jobs = await asyncio.gather(
        *(
            store.jobs.add(f"job-{key}-{number}", f"key-{key}", REQUEST, runs[:1], 99)
            for key in range(5)
            for number, store in enumerate(stores)
        )
    )
    assert len({job.id for job in jobs}) == 5


def test_the_calls_of_a_single_server_before_and_after_a_fleet(url: str) -> None:
    numbers: list[int] = []
    for shared in (False, True, True, False):
        store = Store(url, shared=shared)
        for _ in range(2):
            began = asyncio.run(begin_call(store, None, ()))[0] if shared else store.next_began()
            numbers.append(began)
        store.close()
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("first", "words"),
    [(True, "Another server uses the database"), (False, "set fleet = true")],
)
def test_a_server_without_the_setting_is_refused_and_the_reverse(
    url: str, first: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Store(url, shared=first)
    monkeypatch.setattr(schema, "_JOIN_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=words):
        Store(url, shared=not first)
    one.close()


def test_so_is_one_on_the_same_directory(tmp_path: Path) -> None:
    one, other = lock_data_dir(tmp_path, shared=True), lock_data_dir(tmp_path, shared=True)
    with pytest.raises(ConfigError, match="Another server uses"):
        lock_data_dir(tmp_path)
    one.close()
    other.close()
    alone = lock_data_dir(tmp_path)
    with pytest.raises(ConfigError, match="set fleet = true"):
        lock_data_dir(tmp_path, shared=True)
    alone.close()
