"""Files that are damaged while no server runs: each is found; a start goes on from what is whole.

Bits flipped, ranges zeroed, ends cut off: in adapters, optimizers, configs, manifests and the
database. What SQLite has in its log when it is killed, and the disk then damages, is beyond this:
SQLite cannot tell it from a write that was cut off, and goes on without it.
"""

import contextlib
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError

from langchain_art.errors import ConfigError
from langchain_art_server.backups import Scrub
from langchain_art_server.config import sqlite_url
from langchain_art_server.storage.schema import connect
from langchain_art_server.storage.seals import NUMBER
from langchain_art_server.storage.tables import META, SCHEMA
from tests.support.hot_swap import train_once
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.stub_engines import StubServer

DAMAGES, STARTS = count(24, 500), count(2, 60)
STEPS = 3
DATABASE = "art.sqlite3"
KINDS = ("flip", "zero", "truncate")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of a server that has ended; a policy has three versions."""
    with StubServer(tmp_path_factory.mktemp("damaged") / "data") as server, server.http() as http:
        for step in range(STEPS):
            train_once(http, step)
    with contextlib.closing(sqlite3.connect(server.data_dir / DATABASE)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # all is in the database itself
    return server.data_dir


def damage(path: Path, kind: str, draw: random.Random) -> None:
    """Change a file; what was zero already is not changed by zeros, so that another place is."""
    before = path.read_bytes()
    kind = kind if any(before) else "flip"
    while True:
        after, at = bytearray(before), draw.randrange(len(before))
        if kind == "flip":
            after[at] ^= 1 << draw.randrange(8)
        elif kind == "zero":
            end = min(len(before), at + draw.choice((1, 64, 4096)))
            after[at:end] = bytes(end - at)
        else:
            del after[at:]
        if bytes(after) != before:
            break
    path.write_bytes(after)


def found(data_dir: Path) -> list[str]:
    """What ``langchain-art scrub`` says is damaged."""
    try:
        return list(Scrub(data_dir, sqlite_url(data_dir)).run())
    except ConfigError as error:  # there is no version, or one that this release does not know
        return [str(error)]


def rows(data_dir: Path) -> list[Any] | None:
    """All rows as the server reads them, in their order; None if they cannot be read.

    Not their numbers, which only order them, nor how often a server has started.
    """
    engine, tables = (
        connect(sqlite_url(data_dir)),
        [t for t in META.sorted_tables if t is not SCHEMA],
    )
    queries = [sa.select(*(c for c in t.c if c.name != NUMBER)) for t in tables]
    try:
        with engine.connect() as connection:
            return [connection.execute(query).fetchall() for query in queries]
    except DatabaseError:
        return None
    finally:
        engine.dispose()


@pytest.mark.soak("F4", DAMAGES, "damaged files")
@pytest.mark.slow
def test_every_damaged_file_is_found(whole: Path, tmp_path: Path) -> None:
    draw, place = random.Random(drawn_seed()), tmp_path / "data"
    assert found(whole) == []
    said, unused = rows(whole), 0
    versions = [str(path.relative_to(whole)) for path in whole.glob("adapters/tiny/*/*")]
    for number in range(DAMAGES):
        shutil.copytree(whole, place)
        name = DATABASE if draw.random() < 0.3 else draw.choice(versions)
        damage(place / name, kind := KINDS[number % 3], draw)
        problems = found(place)
        if name == DATABASE and not problems:  # a byte that no row uses
            assert rows(place) == said, kind
            unused += 1
        else:
            version = f"tiny@{Path(name).parent.name}" if name != DATABASE else ""
            assert any(version in problem for problem in problems), (kind, name, problems)
        shutil.rmtree(place)
    assert unused < DAMAGES * 0.3
    print(f"{DAMAGES - unused} found, {unused} in bytes of the database that nothing uses")  # noqa: T201


def test_a_value_of_another_type_is_damage_and_said_in_words(whole: Path, tmp_path: Path) -> None:
    """One changed bit of a record's header makes text of a number, or nothing of text."""
    shutil.copytree(whole, place := tmp_path / "data")
    changed: list[str] = []
    with contextlib.closing(sqlite3.connect(place / DATABASE)) as connection:
        for table in META.sorted_tables:
            floats = [c.name for c in table.columns if isinstance(c.type, sa.Float)]
            if floats and connection.execute(f"SELECT 1 FROM {table.name}").fetchone():
                first = f"WHERE rowid = (SELECT min(rowid) FROM {table.name})"
                connection.execute(f"UPDATE {table.name} SET {floats[0]} = 'x' {first}")
                changed.append(table.info["kind"])
        connection.execute("UPDATE checkpoints SET version = 'x' WHERE version = 2")
        connection.execute("UPDATE checkpoints SET policy = x'00' WHERE version = 3")
        connection.execute("UPDATE calls SET drawn_from = 0 WHERE number = 2")  # b"" before
        connection.execute("UPDATE calls SET version = x'' WHERE number = 3")  # 0 before
        connection.commit()
    problems = found(place)
    assert len(changed) > 8
    assert {k for k in changed if not any(f"The {k} " in p for p in problems)} == set()
    for kind in ("version", "call"):
        assert sum(f"The {kind} " in problem for problem in problems) == 3, problems
    with contextlib.closing(sqlite3.connect(place / DATABASE)) as connection:
        connection.execute("UPDATE art_schema SET version = 'x'")
        connection.commit()
    [problem] = found(place)
    assert "got schema version 'x', expected" in problem
    assert "got schema version 'x', expected" in StubServer(place).refusal()


def test_a_schema_that_is_no_text_any_more_is_said_in_words(whole: Path, tmp_path: Path) -> None:
    """SQLite's own message has the byte in it, and Python's module cannot read that."""
    shutil.copytree(whole, place := tmp_path / "data")
    written = (place / DATABASE).read_bytes()
    begins = written.index(b"CREATE TABLE job_events")
    name = written.rindex(b"job_eventsjob_events", 0, begins)
    (place / DATABASE).write_bytes(written[:name] + b"\xf3" + written[name + 1 :])
    [problem] = found(place)
    assert "malformed" in problem and "restore it from a backup" in problem
    assert "malformed" in StubServer(place).refusal()


@pytest.mark.soak("F4", STARTS, "starts with the serving version damaged")
@pytest.mark.slow
def test_a_start_goes_on_from_the_last_version_that_is_whole(whole: Path, tmp_path: Path) -> None:
    draw = random.Random(drawn_seed())
    for number in range(STARTS):
        place, broken = tmp_path / f"data-{number}", draw.randint(1, STEPS)
        shutil.copytree(whole, place)
        for version in range(broken, STEPS + 1):
            files = sorted((place / "adapters" / "tiny" / str(version)).iterdir())
            damage(draw.choice(files), KINDS[number % 3], draw)
        with StubServer(place) as server, server.http() as http:
            assert http.get("/v1/policies/tiny").json()["version"] == broken - 1
            body = {"model": "tiny", "messages": [{"role": "user", "content": "When?"}]}
            assert (
                http.post("/v1/chat/completions", json=body)
                .json()["model"]
                .endswith(f"@{broken - 1}")
            )
        log = " ".join(server.log.read_text().split())
        for version in range(broken, STEPS + 1):
            assert f"tiny@{version} is damaged and is not used" in log
        assert f"tiny@{STEPS} cannot be used; serving @{broken - 1}" in log
