import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from langchain_art.errors import ConfigError
from langchain_art_server.storage import schema
from langchain_art_server.storage.database import Database, RowCount
from langchain_art_server.storage.tables import CALLS
from tests.support.call_records import record
from tests.support.postgres import Postgres


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with contextlib.closing(Database(database_url)) as opened:
        yield opened


async def test_calls_at_once_share_transactions_and_are_on_disk(
    database: Database, database_url: str
) -> None:
    commits: list[sa.Connection] = []
    event.listen(database.engine, "commit", commits.append)
    other = sa.create_engine(database_url)
    waves = [[f"c-{wave}-{i}" for i in range(100)] for wave in range(2)]

    def on_disk() -> set[str]:
        with other.connect() as connection:
            return set(connection.scalars(sa.select(CALLS.c.id)))

    async def add(name: str) -> None:
        await database.add_calls([record(name), record(f"{name}:1")])
        assert {name, f"{name}:1"} <= on_disk()

    for names in waves:
        await asyncio.gather(*map(add, names))
    assert len(on_disk()) == 400
    other.dispose()
    assert len(commits) <= 4


async def test_a_batch_that_cannot_be_written_fails_each_of_its_calls(database: Database) -> None:
    await database.add_calls([record("a")])
    results = await asyncio.gather(
        database.add_calls([record("a")]), database.add_calls([record("b")]), return_exceptions=True
    )
    assert [type(result) for result in results] == [sa.exc.IntegrityError] * 2
    await database.add_calls([record("b")])  # nothing of it was written


async def test_a_caller_that_leaves_takes_nobody_along(database: Database) -> None:
    tasks = [asyncio.create_task(database.add_calls([record(f"c-{i}")])) for i in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), asyncio.CancelledError, type(None)]
    await database.add_calls([record("d")])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://art@host/art", "got a database_url of 'mysql', expected one of sqlite or"),
        ("art.sqlite3", "none of SQLAlchemy's"),
        ("sqlite:////nowhere/art.sqlite3", "which fails: .*No such file or directory"),
        ("postgresql://art:secret@/art?host=/nowhere", r"art:\*\*\*@/art.*, which fails: .*"),
    ],
)
def test_a_database_that_cannot_be_had_is_refused_in_words(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        Database(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE art_schema SET version = 99", "got schema version 99, .* a newer server made it"),
        ("UPDATE art_schema SET version = 0", "got schema version 0, .* an older server made it"),
        ("DELETE FROM art_schema", "got schema version 0"),
        ("DROP TABLE art_schema", "no schema version, so an older server made it"),
        ("ALTER TABLE calls DROP COLUMN retry", "table 'calls' has no column 'retry'"),
        ("ALTER TABLE calls ADD COLUMN more TEXT", "table 'calls' has an unknown column 'more'"),
        ("DROP TABLE trained_calls", "table 'trained_calls' has no column 'call_id'"),
    ],
)
def test_a_database_of_another_version_is_refused_in_words(
    database_url: str, change: str, words: str
) -> None:
    Database(database_url).close()
    Database(database_url).close()  # of this version: it goes on
    engine = sa.create_engine(database_url)
    with engine.begin() as connection:
        connection.exec_driver_sql(change)
    engine.dispose()
    with pytest.raises(ConfigError, match=f"(?s){words}.*another --data-dir"):
        Database(database_url)


def test_two_servers_never_have_one_database(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "_JOIN_SECONDS", 0.1)
    first = Database(database_url)
    urls = [database_url]
    if database_url.startswith("sqlite"):
        (tmp_path / "link").symlink_to(tmp_path)
        urls.append(f"sqlite:///{tmp_path / 'link' / 'art.sqlite3'}")
    for url in urls:
        with pytest.raises(ConfigError, match="Another server uses the database"):
            Database(url)
    first.close()
    Database(database_url).close()


def test_a_server_waits_until_postgresql_sees_the_end_of_the_last_one(postgres: Postgres) -> None:
    url = postgres.database()
    first = Database(url)
    end = threading.Timer(0.3, first.close)
    end.start()
    Database(url).close()
    end.join()


@pytest.mark.parametrize("damage", ["no database", "header", "page"])
def test_a_damaged_file_is_refused_in_words(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "art.sqlite3"
    Database(f"sqlite:///{path}").close()
    data = bytearray(path.read_bytes())
    match damage:
        case "no database":
            data = bytearray(b"all of it is something else\n" * 500)
        case "header":
            data[3] ^= 1
        case _:
            data[100] ^= 0xFF  # the kind of the first page
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"which fails: .*Put it back from a backup"):
        Database(f"sqlite:///{path}")


async def test_a_read_of_many_queries_is_of_one_moment(database: Database) -> None:
    await database.add_calls([record("a")])
    began, came = threading.Event(), threading.Event()

    def read(connection: sa.Connection) -> list[list[str]]:
        first = list(connection.scalars(sa.select(CALLS.c.id)))
        began.set()
        assert came.wait(30)
        return [first, list(connection.scalars(sa.select(CALLS.c.id)))]

    reading = asyncio.create_task(database.read(read))
    assert await asyncio.to_thread(began.wait, 30)
    await database.add_calls([record("b")])
    came.set()
    assert await reading == [["a"], ["a"]]
    assert await database.read(lambda c: set(c.scalars(sa.select(CALLS.c.id)))) == {"a", "b"}


async def test_rows_are_counted_as_they_come_and_go(database: Database) -> None:
    rows = RowCount(CALLS)
    for number, expected in ((0, 0), (3, 3), (3, 3), (4, 4)):
        known = await database.read(lambda c: set(c.scalars(sa.select(CALLS.c.id))))
        await database.add_calls([record(f"c-{i}") for i in range(number) if f"c-{i}" not in known])
        assert await database.read(rows.read) == expected
    await database.write(lambda c: c.execute(sa.delete(CALLS).where(CALLS.c.id != "c-3")))
    rows.recount()
    assert await database.read(rows.read) == 1
    await database.add_calls([record("c-5"), record("c-6")])
    assert await database.read(rows.read) == 3
