"""Files that the disk changes under a running server, or while none runs, are not used silently.

Bits flipped, ranges zeroed, ends cut off: in adapters, optimizers, configs, manifests and the
database. What SQLite has in its log when it is killed, and the disk then damages, is beyond this:
SQLite cannot tell it from a write that was cut off, and goes on without it.
"""

import contextlib
import io
import os
import random
import shutil
import signal
import sqlite3
import tarfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError
from typer.testing import CliRunner

from langchain_art.errors import ConfigError
from langchain_art_server import backups
from langchain_art_server.backups import Scrub
from langchain_art_server.config import sqlite_url
from langchain_art_server.storage.schema import connect
from langchain_art_server.storage.seals import NUMBER
from langchain_art_server.storage.tables import META, SCHEMA
from tests.support.engines import engines
from tests.support.hot_swap import train_once
from tests.support.live_server import ForkedServer, LiveServer
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.steps_of_a_fit import ended, ok, rewarded
from tests.support.stub_engines import StubServer

FLIPS = count(12, 300)
#: Not data: a lock, and SQLite's index of its log, which is shared memory that is made anew.
_NOT_DATA = (".lock", "lock", "-shm")
WEIGHTS, DATABASE = "adapter_model.safetensors", "art.sqlite3"


@contextlib.contextmanager
def flipped(path: Path, bit: int) -> Generator[None]:
    """One bit of a file is changed, and changed back unless the server has written it again."""
    at = bit // 8

    def change(byte: int) -> None:
        with path.open("r+b") as file:
            if os.pread(file.fileno(), 1, at)[0] == byte:
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), at)

    whole = path.read_bytes()[at]
    change(whole)
    try:
        yield
    finally:
        change(whole ^ 1 << bit % 8)


class Stored:
    """A server with a policy of three versions, and all that it answered about what it stored."""

    def __init__(self, server: LiveServer) -> None:
        self.server, self.http = server, server.http()
        self.runs = [
            rewarded(self.http, f"t-{seed}", float(seed), max_tokens=8, seed=seed)
            for seed in range(4)
        ]
        for _ in range(2):
            assert self.train()["state"] == "succeeded"
        calls = [self.get(f"/v1/trajectories/{run}")["turns"][0]["call_id"] for run in self.runs]
        self.paths = [f"/v1/calls/{call}" for call in calls]
        self.paths += [f"/v1/trajectories/{run}" for run in self.runs]
        self.paths += [f"/v1/trajectories/{run}/audit" for run in self.runs]
        self.paths += [f"/v1/policies/tiny/checkpoints/{n}/adapter" for n in range(3)]
        self.paths += ["/v1/policies", "/v1/policies/tiny/checkpoints", "/v1/jobs"]
        self.truth: dict[str, bytes | str] = {}

    def get(self, path: str) -> Any:
        return ok(self.http.get(path))

    def train(self) -> dict[str, Any]:
        """A job on all runs, once more; as it ended."""
        body: dict[str, Any] = {"policy": "tiny", "groups": [self.runs], "retrain": True}
        body["config"] = {"learning_rate": 2e-5}  # the same runs again and again
        key = {"Idempotency-Key": f"k-{time.monotonic_ns()}"}
        answer = self.http.post("/v1/train", json=body, headers=key)
        if answer.status_code != 202:
            return {"state": "refused", "error": self.refusal(answer)}
        return ended(self.http, answer.json())

    def answers(self) -> dict[str, bytes | str]:
        """The present answers; a string is a refusal."""
        tick = {"id": f"tick-{time.monotonic_ns()}"}  # empties caches
        ok(self.http.post("/v1/trajectories", json=tick))
        found = {path: self.http.get(path) for path in self.paths}
        return {
            path: contents(one) if one.status_code == 200 else self.refusal(one)
            for path, one in found.items()
        }

    def refusal(self, answer: httpx.Response) -> str:
        assert answer.status_code in (404, 500, 503), (answer.status_code, answer.text)
        words = answer.json()["error"]["message"]
        assert isinstance(words, str) and words
        return words

    def files(self) -> list[Path]:
        found = [p for p in sorted(self.server.data_dir.rglob("*")) if p.is_file()]
        return [p for p in found if not p.name.endswith(_NOT_DATA) and p.stat().st_size]

    def scrub(self) -> tuple[int, str]:
        done = CliRunner().invoke(backups.cli, ["scrub", str(self.server.data_dir)])
        assert isinstance(done.exception, SystemExit | None), done.exception
        return done.exit_code, done.output


def contents(answer: httpx.Response) -> bytes:
    """The body; of an archive the files in it, without the times at which they were written."""
    if answer.headers["content-type"] != "application/x-tar":
        return answer.content
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        files = [tar.extractfile(member) for member in tar.getmembers()]
        return b"|".join(file.read() for file in files if file is not None)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    with ForkedServer(tmp_path_factory.mktemp("flips") / "data") as server:
        made = Stored(server)
        yield made
        made.http.close()


@pytest.mark.slow
def test_a_damaged_version_is_refused_wherever_it_is_asked_for(stored: Stored) -> None:
    served = stored.get("/v1/policies/tiny")["version"]
    adapters = stored.server.data_dir / "adapters" / "tiny"
    for file in (WEIGHTS, "optimizer.safetensors", "manifest.json", "adapter_config.json"):
        with flipped(adapters / "1" / file, 8 * 20):
            answer = stored.http.post("/v1/policies/tiny/rollback", json={"version": 1})
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "damaged"
            said = stored.refusal(answer)
            assert "tiny@1 is damaged" in said and file in said
            assert "roll back to a version that is whole: [0, 2" in said
            if file != "optimizer.safetensors":  # which is not part of a download
                answer = stored.http.get("/v1/policies/tiny/checkpoints/1/adapter")
                assert "tiny@1 is damaged" in stored.refusal(answer)
            status, words = stored.scrub()
            assert status == 1 and "tiny@1 is damaged" in words and "1 damaged" in words
            assert "roll back to one of [0, 2" in words
    assert stored.get("/v1/policies/tiny")["version"] == served
    with flipped(adapters / str(served) / "optimizer.safetensors", 8 * 20):
        job = stored.train()
        assert job["state"] == "failed" and f"tiny@{served} is damaged" in job["error"]
    assert stored.get("/v1/policies/tiny")["version"] == served


@pytest.mark.slow
def test_an_engine_that_starts_again_does_not_load_a_damaged_version(stored: Stored) -> None:
    def ask(model: str) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "When?"}]}
        return stored.http.post("/v1/chat/completions", json=body | {"max_tokens": 2})

    assert ask("tiny@1").status_code == 200
    weights = stored.server.data_dir / "adapters" / "tiny" / "1" / WEIGHTS
    with flipped(weights, 8 * weights.stat().st_size - 60):
        assert ask("tiny@1").status_code == 200  # it is in memory as it was
        for pid in engines(stored.server):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while ask("tiny").status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "tiny@1 is damaged" in stored.refusal(ask("tiny@1"))
        assert ask("tiny@0").status_code == 200
    assert ask("tiny@1").status_code == 200, "it was put back"


#: What damages one row of each kind: a bit of its tokens, a digit of its reward.
ROWS = {
    "call": ("calls", "token_ids", lambda ids: bytes([ids[0] ^ 1]) + ids[1:]),
    "trajectory": ("trajectories", "body", lambda body: body[:-1] + bytes([body[-1] ^ 1])),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROWS)
def test_nothing_is_trained_on_a_damaged_row(stored: Stored, kind: str) -> None:
    """Through SQL, because a bit of SQLite's log may be copied before it is turned back."""
    served = stored.get("/v1/policies/tiny")["version"]
    name = stored.runs[0] if kind == "trajectory" else stored.paths[0].rpartition("/")[2]
    table, column, damage = ROWS[kind]
    words = f"{kind} {name!r} in the database is damaged"
    with contextlib.closing(sqlite3.connect(stored.server.data_dir / DATABASE)) as database:
        put = f"UPDATE {table} SET {column} = ? WHERE id = ?"
        [whole] = database.execute(f"SELECT {column} FROM {table} WHERE id = ?", [name]).fetchone()
        with database:
            database.execute(put, [damage(whole), name])
        job = stored.train()
        assert job["state"] in ("failed", "refused") and words in job["error"]
        status, said = stored.scrub()
        assert status == 1 and words in said
        with database:
            database.execute(put, [whole, name])
    assert stored.get("/v1/policies/tiny")["version"] == served
    job = stored.train()
    assert job["state"] == "succeeded", job


@pytest.mark.soak("F4", FLIPS, "bits flipped under a running server")
@pytest.mark.slow
def test_no_bit_that_flips_is_served_or_exported_silently(stored: Stored) -> None:
    draw = random.Random(drawn_seed())
    status, words = stored.scrub()
    assert status == 0 and words.endswith(" 0 damaged\n"), words
    stored.truth, noticed = stored.answers(), 0
    assert set(map(type, stored.truth.values())) == {bytes}
    for _ in range(FLIPS):
        files = stored.files()
        # Half of them anywhere, half in any of the files: else only the largest would be hit.
        sizes = [path.stat().st_size for path in files] if draw.random() < 0.5 else None
        [path] = draw.choices(files, sizes)
        with flipped(path, draw.randrange(8 * path.stat().st_size)):
            answers = stored.answers()
        wrong = {one for one, said in answers.items() if said != stored.truth[one]}
        silent = {one for one in wrong if isinstance(answers[one], bytes)}
        assert not silent, (path, silent)
        noticed += bool(wrong)
    assert noticed > FLIPS / 10


# --- while no server runs -------------------------------------------------------------------------

DAMAGES, STARTS = count(24, 500), count(2, 60)
STEPS = 3
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
    """The names that ``langchain-art scrub`` calls damaged."""
    try:
        return list(Scrub(data_dir, sqlite_url(data_dir)).run())
    except ConfigError as error:  # there is no version, or one that this release does not know
        return [str(error)]


def rows(data_dir: Path) -> list[Any] | None:
    """All rows as the server reads them, in their order; None if they cannot be read.

    Not their numbers, which only order them, nor how often a server has started.
    """
    engine = connect(sqlite_url(data_dir))
    tables = [table for table in META.sorted_tables if table is not SCHEMA]
    queries = [sa.select(*(c for c in table.c if c.name != NUMBER)) for table in tables]
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
            answer = http.post("/v1/chat/completions", json=body).json()
            assert answer["model"].endswith(f"@{broken - 1}")
        log = " ".join(server.log.read_text().split())
        for version in range(broken, STEPS + 1):
            assert f"tiny@{version} is damaged and is not used" in log
        assert f"tiny@{STEPS} cannot be used; serving @{broken - 1}" in log
