"""Files that are damaged while no server runs: each is found; a start goes on from what is whole.

Bits flipped, ranges zeroed, ends cut off: in adapters, optimizers, configs, manifests and the
database. What SQLite has in its log when it is killed, and the disk then damages, is beyond this:
SQLite cannot tell it from a write that was cut off, and goes on without it.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from langchain_art.errors import ConfigError
from langchain_art_server.config import sqlite_url
from langchain_art_server.scrub import Scrub
from langchain_art_server.storage.tables import META
from tests.support.hot_swap import train_once
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.stub_engines import StubServer

DAMAGES, STARTS = count(200, 500), count(6, 60)
STEPS = 3
DATABASE = "art.sqlite3"
KINDS = ("flip", "zero", "truncate")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of a server that has ended; a policy has three versions."""
    server = StubServer(tmp_path_factory.mktemp("damaged") / "data").start()
    with server.http() as http:
        for step in range(STEPS):
            train_once(http, step)
    server.stop()
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
        if after != before:
            break
    path.write_bytes(after)


def found(data_dir: Path) -> list[str]:
    """What ``langchain-art scrub`` says is damaged."""
    try:
        return list(Scrub(data_dir, sqlite_url(data_dir)).run())
    except ConfigError as error:  # there is no version, or one that this release does not know
        return [str(error)]


def rows(data_dir: Path) -> list[Any] | None:
    """All rows of the database; None if they cannot be read."""
    with contextlib.closing(sqlite3.connect(data_dir / DATABASE)) as connection:
        try:
            return [connection.execute(f"SELECT * FROM {t}").fetchall() for t in META.tables]
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            return None


@pytest.mark.soak("F4", DAMAGES, "damaged files")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 1800))
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
@pytest.mark.timeout(count(300, 1800))
def test_a_start_goes_on_from_the_last_version_that_is_whole(whole: Path, tmp_path: Path) -> None:
    draw = random.Random(drawn_seed())
    for number in range(STARTS):
        place, broken = tmp_path / f"data-{number}", draw.randint(1, STEPS)
        shutil.copytree(whole, place)
        for version in range(broken, STEPS + 1):
            files = sorted((place / "adapters" / "tiny" / str(version)).iterdir())
            damage(draw.choice(files), KINDS[number % 3], draw)
        server = StubServer(place).start()
        with server.http() as http:
            assert http.get("/v1/policies/tiny").json()["version"] == broken - 1
            body = {"model": "tiny", "messages": [{"role": "user", "content": "When?"}]}
            assert (
                http.post("/v1/chat/completions", json=body)
                .json()["model"]
                .endswith(f"@{broken - 1}")
            )
        server.stop()
        log = " ".join(server.log.read_text().split())
        for version in range(broken, STEPS + 1):
            assert f"tiny@{version} is damaged and is not used" in log
        assert f"tiny@{STEPS} cannot be used; serving @{broken - 1}" in log
