"""The table of rollbacks keeps one row for two versions, and says what all rows would."""

import random

import pytest
import sqlalchemy as sa

from langchain_art.wire import LoraConfig
from langchain_art_server.storage import store as stored
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import ROLLBACKS
from tests.support.soak import count


def _above(version: int, parents: dict[int, int]) -> set[int]:
    return {version} | (_above(parents[version], parents) if version in parents else set())


@pytest.mark.soak
async def test_the_last_rollback_between_two_versions_is_enough(store: Store) -> None:
    parents, rng, versions = dict[int, int](), random.Random(0), 12
    for version in range(1, versions):
        parents[version] = rng.randrange(version)
    await store.add_policy("p", LoraConfig())
    said, serving = list[tuple[int, int, str]](), 0
    for number in range(count(60, 200)):
        version = rng.randrange(versions)
        await store.roll_back("p", version, f"why {number}")
        if version != serving:
            said.append((serving, version, f"why {number}"))
        serving = version
        expected = dict[int, str]()
        for former, to, why in said:
            out = _above(former, parents) - _above(to, parents)
            expected |= dict.fromkeys(out, why)
        for one in _above(serving, parents):
            expected.pop(one, None)
        with store.engine.connect() as connection:
            found = stored._rolled_back(connection, "p", serving, parents)
        assert {one: back.why for one, back in found.items()} == expected
    with store.engine.connect() as connection:
        kept = connection.scalar(sa.select(sa.func.count()).select_from(ROLLBACKS))
    assert kept == len({(former, to) for former, to, _ in said}) < len(said)
