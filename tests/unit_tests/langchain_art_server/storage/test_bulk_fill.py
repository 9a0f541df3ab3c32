"""The database that `benchmarks.page` fills is the one that the gateway would have written."""

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.browsing.fill import fill, run_of
from langchain_art_server.config import sqlite_url
from langchain_art_server.storage.run_index import RUN_FACTS, RUN_MARKS
from langchain_art_server.storage.run_list import RunsQuery
from langchain_art_server.storage.seals import intact, values_of
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import CALLS, RUN_CALLS, TRAJECTORIES

RUNS = 24


def rows(store: Store, table: sa.Table) -> list[dict[str, Any]]:
    """All but when a run was stored, which a seal covers too."""
    timed = {"created_at", "seal"} if table in (TRAJECTORIES, RUN_FACTS) else set[str]()
    with store.engine.connect() as connection:
        found = connection.execute(sa.select(table).order_by(*table.primary_key))
        known = [values_of(table, intact(table, row)) for row in found]
    return [{name: one[name] for name in one if name not in timed} for one in known]


async def test_a_bulk_fill_writes_what_the_gateway_writes(tmp_path: Path) -> None:
    stores: list[Store] = []
    for name in ("bulk", "gateway"):
        (tmp_path / name).mkdir()
        stores.append(Store(sqlite_url(tmp_path / name)))
    bulk, gateway = stores
    await fill(bulk, RUNS)
    for number in range(RUNS):  # as the routes do: calls one by one, then their run
        run, records = run_of(number, RUNS)
        for record in records:
            await gateway.add_calls([record])
        await gateway.add_trajectories([run])
    for table in (CALLS, TRAJECTORIES, RUN_CALLS, RUN_FACTS, RUN_MARKS):
        assert rows(bulk, table) == rows(gateway, table), table.name
        assert rows(bulk, table)
    for text in ("needle", "word7*", "answer question"):
        found = [(await one.runs.page(RunsQuery(text=text))).runs for one in stores]
        assert [run.id for run in found[0]] == [run.id for run in found[1]] != []
    assert len(await bulk.jobs.latest(RUNS)) == RUNS // 8
    for store in stores:
        store.close()
