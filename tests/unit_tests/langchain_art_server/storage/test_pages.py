from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import sqlalchemy as sa

from langchain_art.client.http_request import pages
from langchain_art.wire import LoggedAction, LoraConfig, Review, TrainRequest, Trajectory
from langchain_art_server.storage.queries import Page, log_once
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import ACTIONS, EVENTS, JOBS, REVIEWS, TRAJECTORIES

Read = Callable[[Store, int, str | None], Awaitable[Page[Any]]]
#: Of each list: its table, the column of its cursor, one that is damaged, and how a page is read.
LISTS: dict[str, tuple[sa.Table, str, str, Read]] = {
    "runs": (TRAJECTORIES, "id", "scenario", lambda s, n, a: s.recent_trajectories(n, after=a)),
    "jobs": (JOBS, "id", "error", lambda s, n, a: s.jobs.page(n, a)),
    "events": (EVENTS, "seq", "message", lambda s, n, a: s.jobs.events("j-0", int(a or 0), n)),
    "reviews": (
        REVIEWS,
        "number",
        "source",
        lambda s, n, a: s.reviews.page(n, after=int(a or 0)),
    ),
    "log": (
        ACTIONS,
        "number",
        "subject",
        lambda s, n, a: s.keys.actions(n, int(a) if a else None),
    ),
}


async def fill(store: Store) -> None:
    """Five rows of each list."""
    runs = [Trajectory(id=f"t-{number}") for number in range(5)]
    await store.add_trajectories(runs)
    await store.add_policy("p", LoraConfig())
    for number in range(5):
        request = TrainRequest(policy="p", groups=((f"t-{number}",),))
        await store.jobs.add(f"j-{number}", f"k-{number}", request, runs[number : number + 1], 9)
        await store.jobs.add_event("j-0", f"said {number}")
        await store.keys.note("default", None, "trained", str(number))
    about: dict[str, Any] = {"source": "s", "kind": "reward", "name": "n", "at": 1.0, "value": 1.0}
    await store.reviews.put([Review(id=run.id, trajectory=run.id, **about) for run in runs])


async def everything(store: Store, read: Read, limit: int) -> tuple[list[Any], list[str]]:
    """Items and messages of a list, page by page."""
    items, damaged, after = list[Any](), list[str](), None
    while True:
        page = await read(store, limit, after)
        assert len(page.items) + len(page.damaged) <= limit
        items += page.items
        damaged += page.damaged
        if not page.has_more:
            return items, damaged
        after = page.last_id


async def test_a_damaged_row_is_left_out_and_the_rest_is_listed(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(store)
    whole = {name: (await everything(store, read, 100))[0] for name, (*_, read) in LISTS.items()}
    for name, (*_, read) in LISTS.items():
        for limit in (1, 2, 3):
            assert await everything(store, read, limit) == (whole[name], [])
        assert len(whole[name]) >= 5
    with store.engine.begin() as connection:
        for name, (table, cursor, column, _) in LISTS.items():
            key = table.c[cursor]
            hurt = list(connection.scalars(sa.select(key).order_by(key)))[1:3]
            other = sa.update(table).where(key.in_(hurt)).values({column: f"x {name}"})
            connection.execute(other)
    for name, (*_, read) in LISTS.items():
        log_once.cache_clear()
        caplog.clear()
        for limit in (1, 2, 3, 100):
            items, damaged = await everything(store, read, limit)
            assert len(items) == len(whole[name]) - 2 and len(set(damaged)) == len(damaged) == 2, (
                name
            )
            assert all("in the database is damaged" in one for one in damaged)
        assert len(caplog.messages) == len(set(caplog.messages)) == 2, name


def test_a_client_goes_on_behind_a_damaged_row_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    entry = LoggedAction(number=1, at=1.0, tenant="t", key=None, action="trained", subject="x")
    flow = pages("/v1/log", LoggedAction, {}, 2)
    answers = [
        b'{"data":[],"last_id":"2","has_more":true,"damaged":["entry 2 is damaged"]}',
        b'{"data":[%b],"last_id":"1","has_more":false}' % entry.model_dump_json().encode(),
    ]
    request = next(flow)
    with pytest.raises(StopIteration) as end:
        for content in answers:
            request = flow.send(request.parse(content))
    assert end.value.value == [entry]
    assert [one for one in caplog.messages if "entry 2" in one] == [
        "A list leaves a row out. entry 2 is damaged"
    ]
