"""A database that an earlier release wrote is opened, whole; one of a later release is refused."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from langchain_art import wire
from langchain_art.errors import ConfigError
from langchain_art_server.storage.run_list import RunFilter
from langchain_art_server.storage.schema import STEPS, check_schema, connect
from langchain_art_server.storage.seals import intact
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import META, SCHEMA, SCHEMA_VERSION
from tests.support.call_records import record
from tests.support.old_databases import VERSIONS, postgres_of, sqlite_of

#: Copies of this process, which need not import anything.
FORK = multiprocessing.get_context("fork")


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def stored(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[int], str]:
    """Puts a stored database of an earlier release there, and gives its URL."""
    if kind == "sqlite":
        return lambda version: sqlite_of(version, tmp_path / "art.sqlite3")
    postgres = request.getfixturevalue("postgres")
    return lambda version: postgres_of(version, postgres.database())


@pytest.fixture(params=VERSIONS)
def old_url(request: pytest.FixtureRequest, stored: Callable[[int], str]) -> str:
    return stored(request.param)


@pytest.fixture
def oldest_url(stored: Callable[[int], str]) -> str:
    return stored(VERSIONS[0])


def contents(url: str) -> dict[str, Any]:
    """Every table with its columns and rows, and the indexes."""
    engine = connect(url)
    found: dict[str, Any] = {}
    with engine.connect() as connection:
        inspector = sa.inspect(connection)
        for name in sorted(inspector.get_table_names()):
            if name.startswith("run_words_"):  # FTS5's own
                continue
            columns = [one["name"] for one in inspector.get_columns(name)]
            rows = connection.execute(sa.text(f"SELECT * FROM {name}")).all()
            indexes = sorted(str(one["name"]) for one in inspector.get_indexes(name))
            found[name] = columns, sorted(map(repr, rows)), indexes
    engine.dispose()
    return found


def version_of(url: str) -> list[int]:
    engine = connect(url)
    with engine.connect() as connection:
        found = list(connection.scalars(sa.select(SCHEMA.c.version)))
    engine.dispose()
    return found


def test_every_step_leads_to_this_version_and_the_last_release_is_stored() -> None:
    assert sorted(STEPS) == list(range(min(STEPS), SCHEMA_VERSION))
    assert VERSIONS[-1] == SCHEMA_VERSION - 1, "store it: see tests.support.old_databases"


async def test_a_database_of_an_earlier_release_goes_on(old_url: str) -> None:
    store = Store(old_url)
    calls = await store.tagged_calls("t-1")
    assert [one.id for one in calls] == ["t-1-c0", "t-1-c1"]
    assert calls[0].prompt_token_ids == [1, 2, 3] and calls[0].logprobs == [-0.5, -0.5]
    first = await store.trajectory("t-1")
    assert first.trajectory.reward == 1.0 and first.trained_by == {"p": "job-1"}
    assert (await store.trajectory("t-2")).trajectory.reward == -1.0
    assert [one.version for one in await store.checkpoints("p")] == [0, 1]
    assert (await store.policies())["p"][1] == 1
    job = await store.jobs.next_open()
    assert job is not None and job.id == "job-2"  # the one that waited is run
    assert (await store.jobs.get("job-1")).result.metrics == {"loss": 0.5}  # type: ignore[union-attr]
    assert (await store.jobs.last_events("job-1", 1))[0].message == "published p@1"
    assert len((await store.reviews.page(10, trajectory="t-1")).items) == 1
    found = await store.runs.page(RunFilter(text="hello", policy="p"))
    assert [one.id for one in found.runs] == ["t-2", "t-1"]
    # And what comes is stored beside it, by rows that the next start reads.
    await store.add_calls([record("new")])
    await store.set_reward("t-2", wire.Reward(metadata={"seen": True}))
    store.close()
    engine = connect(old_url)
    with engine.connect() as connection:
        check_schema(connection)
        for table in META.sorted_tables:
            if table is not SCHEMA:
                for row in connection.execute(sa.select(table)):
                    intact(table, row)
    engine.dispose()


def test_it_has_the_tables_of_a_new_database(
    old_url: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    Store(old_url).close()
    new = f"sqlite:///{tmp_path / 'new.sqlite3'}"
    if kind == "postgresql":
        new = request.getfixturevalue("postgres").database()
    Store(new).close()

    def shape(url: str) -> dict[str, Any]:
        return {name: (columns, tags) for name, (columns, _, tags) in contents(url).items()}

    def keys(url: str) -> dict[str, Any]:
        engine = connect(url)
        with engine.connect() as connection:
            look = sa.inspect(connection)
            found = {name: look.get_pk_constraint(name) for name in META.tables}
        engine.dispose()
        return {name: sorted(one["constrained_columns"]) for name, one in found.items()}

    assert shape(old_url) == shape(new)
    assert keys(old_url) == keys(new)


def dies_in_the_last_step(url: str) -> None:
    last = max(STEPS)
    step = STEPS[last]

    def killed(connection: sa.Connection) -> None:
        step(connection)
        os.kill(os.getpid(), signal.SIGKILL)

    STEPS[last] = killed  # of this process, which is a copy
    Store(url)


def opens(url: str, ready: Barrier, ended: Barrier, said: Queue[str]) -> None:
    ready.wait()
    try:
        store = Store(url)
    except ConfigError as error:
        said.put(str(error))
    else:
        said.put("opened")
        ended.wait()
        store.close()


def test_a_migration_that_is_killed_leaves_the_old_state(oldest_url: str) -> None:
    before, version = contents(oldest_url), version_of(oldest_url)
    child = FORK.Process(target=dies_in_the_last_step, args=(oldest_url,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert contents(oldest_url) == before and version_of(oldest_url) == version
    Store(oldest_url).close()
    assert version_of(oldest_url) == [SCHEMA_VERSION]


def test_of_two_servers_that_start_at_once_one_migrates(oldest_url: str) -> None:
    engine = connect(oldest_url)
    with engine.connect() as connection:
        starts = connection.scalars(sa.select(SCHEMA.c.starts)).one()
    engine.dispose()
    ready, ended, said = FORK.Barrier(2), FORK.Barrier(2), FORK.Queue()
    children = [FORK.Process(target=opens, args=(oldest_url, ready, ended, said)) for _ in "12"]
    for child in children:
        child.start()
    answers = sorted((said.get(timeout=60) for _ in children), key=len)
    ended.wait(60)
    for child in children:
        child.join(60)
    assert answers[0] == "opened" and "Another server uses the database" in answers[1]
    with engine.connect() as connection:
        assert list(connection.execute(sa.select(SCHEMA))) == [(SCHEMA_VERSION, starts + 1)]
    engine.dispose()


def test_one_of_a_newer_release_is_refused_and_left_as_it_is(database_url: str) -> None:
    Store(database_url).close()
    engine = connect(database_url)
    with engine.begin() as connection:
        connection.execute(sa.update(SCHEMA).values(version=SCHEMA_VERSION + 1))
        connection.exec_driver_sql("CREATE TABLE of_a_later_release (id INTEGER)")
    engine.dispose()
    before = contents(database_url)
    wanted = (
        f"(?s)got schema version {SCHEMA_VERSION + 1}, expected {SCHEMA_VERSION}, so a newer "
        "server made it.*Start the version of langchain-art that made it"
    )
    with pytest.raises(ConfigError, match=wanted):
        Store(database_url)
    assert contents(database_url) == before
