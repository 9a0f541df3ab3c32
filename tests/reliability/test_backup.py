"""Backups of a server that trains, rolls back and prunes meanwhile; and kills in the middle."""

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

from langchain_art import ArtClient
from langchain_art.errors import ConfigError
from langchain_art.wire.api_keys import new_api_key
from langchain_art_server import backups
from langchain_art_server.backups import Scrub, back_up
from langchain_art_server.config import sqlite_url
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.storage.store import Store
from tests.support.live_server import ForkedServer
from tests.support.operations import Operations
from tests.support.seeds import drawn_seed
from tests.support.soak import count, share
from tests.support.steps_of_a_fit import rewarded, trained
from tests.support.stored_step import RATE
from tests.support.stub_engines import StubServer

BACKUPS = count(2, 100)
TENANTS = ("default", "ana")
#: Engines that compute are of `test_a_tenant_and_a_backup_are_of_all_servers`, and of the soak.
SERVER = ForkedServer if share() else StubServer
#: Of the operations before which a command is killed.
STRIDE = 12 // count(1, 12)


@pytest.fixture(autouse=True)
def _private() -> Iterator[None]:
    """As the commands begin."""
    former = os.umask(0o077)
    yield
    os.umask(former)


class Busy(threading.Thread):
    """Trains each tenant's policy in turn, rolls back, and deletes versions; retention prunes."""

    def __init__(self, server: ForkedServer, keys: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self.server, self.keys = server, keys
        self.stopped, self.steps = threading.Event(), 0
        #: Runs whose reward was acknowledged, by tenant.
        self.acknowledged: dict[str, list[str]] = {tenant: [] for tenant in TENANTS}

    def run(self) -> None:
        for number in itertools.count():
            for tenant in TENANTS:
                if self.stopped.is_set():
                    return
                with self.server.http(self.keys[tenant]) as http:
                    train(http, f"busy-{number}", self.acknowledged[tenant])
                    if number % 3 == 2:
                        roll_back(http)
                self.steps += 1


def train(http: httpx.Client, name: str, acknowledged: list[str]) -> int:
    """A step of the policy. Returns its version."""
    runs = [f"{name}-{seed}" for seed in range(2)]
    for seed, run in enumerate(runs):
        rewarded(http, run, float(seed), max_tokens=4, seed=seed)
        acknowledged.append(run)
    job = trained(http, [runs], key=name, config={"learning_rate": RATE})
    assert job["state"] == "succeeded", job
    return job["result"]["version"]


def roll_back(http: httpx.Client) -> None:
    """To the version before, and the one that served is deleted."""
    kept = http.get("/v1/policies/tiny/checkpoints").json()["data"]
    versions = [one["version"] for one in kept]
    http.post("/v1/policies/tiny/rollback", json={"version": versions[-2]}).raise_for_status()
    http.delete(f"/v1/policies/tiny/checkpoints/{versions[-1]}").raise_for_status()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(count(600, 7200))
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_every_backup_of_a_busy_server_is_a_server(tmp_path: Path) -> None:
    key, settings = new_api_key(), "keep_checkpoints = 1\n"
    server = SERVER(tmp_path / "data", settings=settings, env={"ART_API_KEY": key}).start()
    keys = {"default": key}
    with ArtClient(server.base_url, api_key=key) as client:
        keys["ana"] = client.create_key("ana", tenant="ana", scopes=["admin"]).key
    with ArtClient(server.base_url, api_key=keys["ana"]) as client:
        client.create_policy("tiny")
    busy = Busy(server, keys)
    busy.start()
    made: list[Path] = []
    try:
        for number in range(BACKUPS):
            before = busy.steps
            while busy.steps < before + 2 and busy.is_alive():
                time.sleep(0.01)
            known = {tenant: list(runs) for tenant, runs in busy.acknowledged.items()}
            place = tmp_path / f"copy-{number}"
            versions, damaged = back_up(server.data_dir, place, None)
            assert not damaged and set(versions) == {Path(), Path("tenants", "ana")}
            for tenant, runs in known.items():
                folder = place if tenant == "default" else place / "tenants" / tenant
                assert set(runs) <= named(folder, "SELECT id FROM trajectories"), (
                    "acknowledged before the backup began"
                )
                assert named(folder) == {v for _, v in versions[folder.relative_to(place)]}
                assert named(folder) <= on_disk(folder)
            assert {path.stat().st_mode & 0o077 for path in place.rglob("*")} == {0}
            made.append(place)
    finally:
        busy.stopped.set()
        busy.join()
        server.stop()
    for place in random.Random(drawn_seed()).sample(made, count(1, 20)):
        goes_on(place, settings, keys)


def goes_on(place: Path, settings: str, keys: dict[str, str]) -> None:
    """A server on a backup has each version that is named, and trains from it."""
    with SERVER(place, settings=settings, env={"ART_API_KEY": keys["default"]}) as server:
        for tenant in TENANTS:
            folder = place if tenant == "default" else place / "tenants" / tenant
            highest = max(on_disk(folder))
            with server.http(keys[tenant]) as http:
                for version in sorted(named(folder)):
                    name = f"tiny@{version}"
                    body = {"model": name, "messages": [{"role": "user", "content": "When?"}]}
                    answer = http.post("/v1/chat/completions", json=body | {"max_tokens": 2})
                    assert answer.status_code == 200 and answer.json()["model"] == name
                assert train(http, "after", []) > highest


def named(folder: Path, query: str = "SELECT version FROM checkpoints") -> set[Any]:
    """The first column of the rows that a query gives."""
    with contextlib.closing(sqlite3.connect(folder / "art.sqlite3")) as database:
        return {row[0] for row in database.execute(query)}


def on_disk(folder: Path) -> set[int]:
    return {int(one.name) for one in (folder / "adapters" / "tiny").iterdir()}


def test_a_version_that_comes_and_goes_while_the_database_is_copied(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, target = tmp_path / "data", tmp_path / "copy"
    shutil.copytree(data, place)
    copy, copies = backups._copy_sqlite, list[set[int]]()

    async def between(publish: tuple[int, ...], delete: tuple[int, ...]) -> None:
        store, adapters = Store(sqlite_url(place)), AdapterStore(place / "adapters")
        for version in publish:
            staged = adapters.stage()
            (staged / "adapter_config.json").write_text("{}")
            about = {"policy": "tiny", "version": version, "parent": 2, "created_at": 1.0}
            adapters.publish(staged, "tiny", version, about | {"metrics": {}})
            await store.add_checkpoint(adapters.checkpoint(about))
        for version in delete:
            await store.forget_checkpoint("tiny", version)
            adapters.delete("tiny", version)
        store.close()

    def busy(folder: Path, places: dict[Path, str]) -> backups.Named:
        first = not copies
        if first:  # 1 is copied and gone, 3 and 4 come
            asyncio.run(between((3, 4), (1,)))
        found = copy(folder, places)
        copies.append({version for _, version in found[Path()]})
        if first:  # 4 is named, was not copied, and goes
            asyncio.run(between((), (4,)))
        return found

    monkeypatch.setattr(backups, "_copy_sqlite", busy)
    versions, damaged = back_up(place, target, None)
    assert copies == [{0, 2, 3, 4}, {0, 2, 3}] and not damaged
    assert {version for _, version in versions[Path()]} == named(target) == {0, 2, 3}
    assert on_disk(target) == {0, 1, 2, 3}, "1 was not gone yet"
    assert AdapterStore(target / "adapters").unused("tiny") == 5, "a name is used once"


# --- what is refused ----------------------------------------------------------------------------


def test_a_backup_replaces_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, other, typo = tmp_path / "place", tmp_path / "other", tmp_path / "typo.sqlite3"
    back_up(data, place, None)
    (empty := tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for source, target, url, words in (
        (data, place, None, "which exists"),
        (data, Path(), None, "which exists"),
        (empty, other, None, "has no art.sqlite3"),
        (data, other, f"sqlite:///{typo}", "not there"),
        (data, other, "my-database", "none of SQLAlchemy's"),
        (data, tmp_path / "none" / "other", None, "cannot be made(?!.*was killed)"),
    ):
        with pytest.raises(ConfigError, match=words):
            back_up(source, target, url)
    assert not other.exists() and not typo.exists()


def test_a_database_that_does_not_answer_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(OperationalError):
        [*Scrub(tmp_path, "postgresql://art@127.0.0.1:1/art").run()]


def test_a_version_that_was_damaged_before_is_backed_up_and_said(
    data: Path, tmp_path: Path
) -> None:
    place = tmp_path / "damaged"
    shutil.copytree(data, place)
    weights = place / "adapters" / "tiny" / "1" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    done = CliRunner().invoke(backups.cli, ["backup", str(place), str(tmp_path / "copy")])
    assert done.exit_code == 1 and "tiny@1 is damaged" in done.output
    assert (tmp_path / "copy" / "adapters" / "tiny" / "2").is_dir()


# --- kills --------------------------------------------------------------------------------------


def backed_up(place: Path, target: Path, at: int) -> bool:
    """True if a child that is killed before its operation `at` has ended before."""
    child = os.fork()
    if child == 0:
        with Operations(target.parent) as operations:
            operations.before = lambda number, _: os.kill(os.getpid(), 9) if number >= at else None
            try:
                back_up(place, target, None)
            finally:
                os._exit(0)
    return not os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.soak
@pytest.mark.timeout(count(300, 3600))
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_kill_leaves_nothing_that_looks_whole(data: Path, tmp_path: Path) -> None:
    """Before each operation on a file: what is there under its name was made whole."""
    place, root = tmp_path / "data", tmp_path / "work"
    shutil.copytree(data, place)
    target, partial = root / "copy", root / "copy.partial"
    for at in itertools.count(1, STRIDE):
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        if backed_up(place, target, at):
            break
        if target.exists():
            assert named(target) == {0, 1, 2} == on_disk(target)
            shutil.rmtree(target)
        if partial.exists():
            with pytest.raises(ConfigError, match=f"{partial} cannot be made.*remove it"):
                back_up(place, target, None)
            shutil.rmtree(partial)
        back_up(place, target, None)
        assert [one.name for one in root.iterdir()] == ["copy"]
    assert at > 10
