"""Databases of earlier schemas, as the servers of their time made them, and the program for it.

``python -m tests.support.old_databases FOLDER`` writes what the server of this tree stores to
``FOLDER/schema-N.sqlite3.gz`` and ``schema-N.postgresql.sql.gz``, where N is its `SCHEMA_VERSION`.
Run it before you raise that number, and never again for the same number: what is tested is that the
next server opens what an earlier one wrote. (The tree before 6 made those of 5, with this file.)
"""

from __future__ import annotations

import asyncio
import gzip
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from langchain_art import wire
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import SCHEMA_VERSION
from tests.support.call_records import record

FOLDER = Path(__file__).parents[1] / "unit_tests" / "langchain_art_server" / "storage" / "schemas"
VERSIONS = sorted({int(path.name.split(".")[0][7:]) for path in FOLDER.glob("schema-*")})


def sqlite_of(version: int, path: Path) -> str:
    """A database of that schema at `path`; its URL."""
    path.write_bytes(gzip.decompress((FOLDER / f"schema-{version}.sqlite3.gz").read_bytes()))
    return f"sqlite:///{path}"


def postgres_of(version: int, url: str) -> str:
    """The empty database of `url` as one of that schema; its URL."""
    import psycopg  # not every machine has PostgreSQL

    script = gzip.decompress((FOLDER / f"schema-{version}.postgresql.sql.gz").read_bytes())
    with psycopg.connect(url.replace("postgresql+psycopg", "postgresql")) as connection:
        connection.execute(script)
    return url


async def fill(store: Store) -> None:
    """Two runs of two calls each, rewards, a review, a policy, two jobs, one of which has ended.

    The second run is assembled from its calls. And a rollout that no worker has leased.
    """
    tags = {name: wire.CallTags(trajectory_id=name, node="agent") for name in ("t-1", "t-2")}
    calls = [
        record(f"{run}-c{i}", prompt=(1, 2, 3), said=(4, 5), tags=tags[run], began=i)
        for run in tags
        for i in range(2)
    ]
    await store.add_calls(calls)
    await store.add_policy("p", wire.LoraConfig())
    known: dict[str, Any] = {"policy": "p", "parent": None, "created_at": 1.0, "bytes": 10}
    known |= {"pinned": False, "serving": True, "metrics": {}, "version": 0, "name": "p@0"}
    await store.add_checkpoint(wire.Checkpoint.model_validate(known))
    runs = [_run(name) for name in tags]
    await store.add_trajectories(runs[:1], "g-1")
    await store.set_reward("t-2", wire.Reward(reward=-1.0), runs[1])
    mine = {"source": "langfuse", "trajectory": "t-1", "at": 2.0, "name": "human_reward"}
    review = wire.Review.model_validate(mine | {"id": "r-1", "kind": "score", "value": 1.0})
    await store.reviews.put([review])
    for name in ("job-1", "job-2"):
        request = wire.TrainRequest(policy="p", groups=(("t-1", "t-2"),), config=wire.TrainConfig())
        await store.jobs.add(name, f"fit:p:step:{name[-1]}", request, runs, 100)
    await store.jobs.begin("job-1", 0, 1)
    made = wire.Checkpoint.model_validate(known | {"version": 1, "name": "p@1", "parent": 0})
    result = wire.TrainResult(policy="p", version=1, metrics={"loss": 0.5}, excluded={})
    runs_of_it, calls_of_it = ["t-1", "t-2"], ["t-1-c0", "t-2-c1"]
    await store.jobs.finish("job-1", result, None, made, runs_of_it, calls_of_it, "published p@1")
    queued = wire.QueuedRollout(id="q-1", scenario={"q": 1}, name="s")
    await store.rollouts.put(wire.RolloutBatch(batch="b-1", rollout="m:f", rollouts=(queued,)))


def _run(name: str) -> wire.Trajectory:
    turns = tuple(
        wire.Turn(
            call_id=f"{name}-c{i}",
            node="agent",
            model="p@0",
            messages=({"role": "user", "content": f"hello {name}"},),
            reply={"role": "assistant", "content": "there"},
        )
        for i in range(2)
    )
    reward = 1.0 if name == "t-1" else None
    return wire.Trajectory(id=name, scenario="s", reward=reward, status="completed", turns=turns)


def _write(folder: Path) -> None:
    from tests.support.postgres import Postgres, programs

    folder.mkdir(exist_ok=True)
    name = f"schema-{SCHEMA_VERSION}"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "art.sqlite3"
        _fill(f"sqlite:///{path}")
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA journal_mode=DELETE")
            connection.execute("VACUUM")
        (folder / f"{name}.sqlite3.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    bin_dir = programs()
    if bin_dir is None:
        sys.exit("got no PostgreSQL on this machine, expected its programs")
    cluster = Postgres()
    try:
        url = cluster.database()
        _fill(url)
        plain = url.replace("postgresql+psycopg", "postgresql")
        argv = [str(bin_dir / "pg_dump"), "--inserts", "--no-owner", "--dbname", plain]
        said = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
        # psql's own commands, and settings that other releases do not know.
        kept = [one for one in said.splitlines() if not one.startswith(("\\", "SET ", "--"))]
        kept = [one for one in kept if "set_config('search_path'" not in one]
        script = "\n".join(kept).encode()
        (folder / f"{name}.postgresql.sql.gz").write_bytes(gzip.compress(script, mtime=0))
    finally:
        cluster.remove()


def _fill(url: str) -> None:
    store = Store(url)
    asyncio.run(fill(store))
    store.close()


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
