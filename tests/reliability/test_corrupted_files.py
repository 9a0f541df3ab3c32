"""Bits that the disk changes under a running server: nothing that they hit is used silently."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import sqlite3
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from langchain_art_server import backups
from tests.support.engines import engines
from tests.support.live_server import ForkedServer, LiveServer
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.steps_of_a_fit import ended, ok, rewarded

FLIPS = count(12, 300)
#: Not data: a lock, and SQLite's index of its log, which is shared memory that is made anew.
_NOT_DATA = (".lock", "lock", "-shm")
WEIGHTS = "adapter_model.safetensors"


class Flip:
    """One bit of one file, changed and changed back."""

    def __init__(self, path: Path, bit: int) -> None:
        self.path, self._at, self._mask = path, bit // 8, 1 << bit % 8

    def __enter__(self) -> Flip:
        self.flipped = self._turn()
        return self

    def __exit__(self, *_: object) -> None:
        if self._byte() == self.flipped:  # else the server has written it again
            self._turn()

    def _byte(self) -> bytes:
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), 1, self._at)

    def _turn(self) -> bytes:
        with self.path.open("r+b") as file:
            turned = bytes([os.pread(file.fileno(), 1, self._at)[0] ^ self._mask])
            os.pwrite(file.fileno(), turned, self._at)
        return turned


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
        """What is answered now; a string is a refusal."""
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
    # Under nohup it is ignored, which children inherit, and a server then ignores it, too.
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with ForkedServer(tmp_path_factory.mktemp("flips") / "data") as server:
        signal.signal(signal.SIGHUP, former)
        made = Stored(server)
        yield made
        made.http.close()


@pytest.mark.slow
def test_a_damaged_version_is_refused_wherever_it_is_asked_for(stored: Stored) -> None:
    served = stored.get("/v1/policies/tiny")["version"]
    adapters = stored.server.data_dir / "adapters" / "tiny"
    for file in (WEIGHTS, "optimizer.safetensors", "manifest.json", "adapter_config.json"):
        with Flip(adapters / "1" / file, 8 * 20):
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
    with Flip(adapters / str(served) / "optimizer.safetensors", 8 * 20):
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
    with Flip(weights, 8 * weights.stat().st_size - 60):
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
    with contextlib.closing(sqlite3.connect(stored.server.data_dir / "art.sqlite3")) as database:
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
        with Flip(path, draw.randrange(8 * path.stat().st_size)) as flip:
            answers = stored.answers()
        wrong = {one for one, said in answers.items() if said != stored.truth[one]}
        silent = {one for one in wrong if isinstance(answers[one], bytes)}
        assert not silent, (flip.path, silent)
        noticed += bool(wrong)
    assert noticed > FLIPS / 10


def test_a_hangup_drains_as_sigterm_does(stored: Stored) -> None:
    """The last test here: the server has ended after it."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "When?"}], "stream": True}
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with stored.http.stream(
            "POST", "/v1/chat/completions", json=body | {"max_tokens": 200}
        ) as s:
            for line in s.iter_lines():
                begun.set()
                lines.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    process = stored.server.process
    assert process is not None
    process.send_signal(signal.SIGHUP)
    reader.join(60)
    assert process.wait(60) == 0
    assert [line for line in lines if line][-1] == "data: [DONE]"
