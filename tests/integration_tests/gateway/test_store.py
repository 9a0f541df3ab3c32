"""The store: what is acknowledged is on disk, ids are used once, nothing is rounded."""

import asyncio
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import Conflict, Damaged, EngineUnavailable, InvalidRequest, NotFound
from langchain_art.wire import (
    AttemptOutcome,
    CallTags,
    Checkpoint,
    KeySpec,
    LeaseRequest,
    LoraConfig,
    QueuedRollout,
    Review,
    ReviewTraining,
    Reward,
    RolloutBatch,
    TrainRequest,
    Trajectory,
    Turn,
)
from langchain_art.wire.trajectories import EVALUATION
from langchain_art_server.storage import queries
from langchain_art_server.storage.deletions import MAX_PINNED
from langchain_art_server.storage.fleet import PolicyLeases
from langchain_art_server.storage.job_store import ReviewStep
from langchain_art_server.storage.queries import Page
from langchain_art_server.storage.review_store import VerdictMark
from langchain_art_server.storage.run_index import RUN_MARKS
from langchain_art_server.storage.run_list import RunsQuery
from langchain_art_server.storage.seals import insert, intact, sealed
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import (
    CALL_IMAGES,
    CALLS,
    META,
    RUN_CALLS,
    SCHEMA,
    CallRecord,
)
from tests.support import call_records
from tests.support.live_server import LiveServer
from tests.support.postgres import Postgres
from tests.support.soak import count, share


def record(call_id: str, **changes: Any) -> CallRecord:
    values: dict[str, Any] = {
        "created_at": time.time(),
        "version": 3,
        "model": "p@3",
        "tags": CallTags(trajectory_id="t-1", node="writer", path=("team", "writer")),
        "request": {"messages": [{"role": "user", "content": "héllo \u2028"}]},
        "reply": {"role": "assistant", "content": "x"},
        "logprobs": [-0.1, -1e-300],
        "temperature": 0.7,
        "latency": 0.5,
        "retry": 2,
    }
    return call_records.record(call_id, [1, 2, 2**31 - 1], [4, 5], **(values | changes))


async def test_a_record_comes_back_bit_for_bit(store: Store) -> None:
    one = record("c-1")
    await store.add_calls([one])
    assert await store.call("c-1") == one
    assert [r.id for r in await store.tagged_calls("t-1")] == ["c-1"]
    with pytest.raises(NotFound, match="c-2"):
        await store.call("c-2")


@given(
    ids=st.lists(st.integers(0, 2**31 - 1)),
    logprobs=st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False)),
)
def test_token_arrays_survive_the_row(ids: list[int], logprobs: list[float]) -> None:
    row = sealed(CALLS, record("c", token_ids=ids, logprobs=logprobs).row()) | {"number": 1}

    class Row:
        def __getattr__(self, name: str) -> object:
            return row[name]

    back = CallRecord.of(Row())  # type: ignore[arg-type]
    assert back.token_ids == ids
    assert all(
        a == b and math.copysign(1, a) == math.copysign(1, b)
        for a, b in zip(back.logprobs, logprobs, strict=True)
    )


#: What each type of column holds instead of what was written.
OTHER = {"STRING": "x", "TEXT": "x", "FLOAT": 7.5, "BIGINTEGER": 77, "INTEGER": 77, "BLOB": b"x"}


async def filled(store: Store) -> dict[str, list[object]]:
    """A row in every table; and by table what reads it."""
    shown = {"messages": [], "images": ["i-1"]}
    await store.add_calls([record("c-1", request=shown, images={"i-1": b"seen"})])
    held_out = Trajectory(id="t-1", scenario="s", reward=1.0, metadata={EVALUATION: "p@0"})
    await store.add_trajectories([held_out], "g-1")
    await store.add_policy("p", LoraConfig(rank=4))
    await store.add_checkpoint(
        Checkpoint(policy="p", version=0, name="p@0", parent=None, created_at=1.0, bytes=10)
    )
    mark = VerdictMark("t-1", "", "reward", "r", "1.0", "t-1", [("api", "c-1")])
    step = ReviewStep("job-1", TrainRequest(policy="p", groups=(("t-1",),)), [], [mark])
    await store.jobs.add_reviewed("k", ReviewTraining(policy="p"), [step], [], 9)
    await store.jobs.begin("job-1", 0, 1)
    await store.jobs.finish("job-1", None, None, trained=["t-1"], calls=["c-1"], message="done")
    said = Review(id="c-1", source="api", trajectory="t-1", kind="reward", name="r", value=1, at=2)
    await store.reviews.put([said])
    await store.keys.add(KeySpec(name="Ann"), "ab" * 32, by=None)
    await store.roll_back("p", 1, "it was better")
    run = lambda: store.trajectories(["t-1"])  # noqa: E731
    # A store of a fleet would be PostgreSQL's.
    shared: Any = SimpleNamespace(shared=True, write=lambda work, **_: store.write(work))
    leases = PolicyLeases(shared)
    assert await leases.take("p")
    rollouts = store.rollouts
    one = QueuedRollout(id="r-1", scenario="s")
    await rollouts.put(RolloutBatch(batch="b-1", rollout="m:f", rollouts=(one,)))
    leased = await rollouts.lease(LeaseRequest(worker="w-1", rollout="m:f", slots=1, free=1))
    id_ = leased.leases[0].trajectory_id
    outcome = AttemptOutcome(trajectory_id=id_, trajectory=Trajectory(id=id_))
    return {
        "rollout_batches": [lambda: rollouts.status("b-1")],
        "rollouts": [lambda: rollouts.complete("r-1", outcome)],
        "workers": [rollouts.counts],
        "calls": [lambda: store.calls(["c-1"]), lambda: store.tagged_calls("t-1")],
        "images": [lambda: store.image("i-1"), lambda: store.calls(["c-1"])],
        "trajectories": [run, lambda: store.recent_trajectories(9, None)],
        "trained": [run],
        "trained_calls": [lambda: store.jobs.trained_calls(["c-1"], "p")],
        "policies": [store.policies, lambda: store.roll_back("p", 1, "")],
        "checkpoints": [lambda: store.checkpoints("p"), lambda: store.set_pinned("p", 0, True)],
        "rollbacks": [lambda: store.checkpoints("p")],
        "jobs": [lambda: store.jobs.get("job-1"), lambda: store.jobs.payload("job-1")],
        "run_facts": [lambda: store.runs.page(RunsQuery()), lambda: store.runs.siblings("t-1")],
        "reviews": [lambda: store.reviews.page(9)],
        "trained_verdicts": [lambda: store.reviews.marks("p")],
        "held_out_scenarios": [lambda: store.reviews.held_out(["s"])],
        "job_events": [lambda: store.jobs.events("job-1", 0, 9)],
        "api_keys": [store.keys.known, store.keys.all],
        "policy_leases": [lambda: leases.take("p"), lambda: leases.renew("p")],
        "actions": [lambda: store.keys.actions(9)],
    }


async def refusal(read: Callable[[], Awaitable[Any]]) -> str:
    """The message by which a read refuses a damaged row, or a list leaves it out."""
    try:
        found = await read()
    except Damaged as error:
        return str(error)
    assert isinstance(found, Page) and not found.items, found
    [said] = found.damaged
    return said


async def test_a_row_that_the_disk_changed_is_refused_by_name(store: Store) -> None:
    readers = await filled(store)
    kinds = set[str]()  # of columns that PostgreSQL was tried with
    for table in META.sorted_tables:
        # These name rows, and are not used else.
        if table in (SCHEMA, RUN_CALLS, RUN_MARKS, CALL_IMAGES):
            continue
        keys = {"id", "number", *(column.name for column in table.primary_key)}
        names = ["'c-1'", "'t-1'", "'p'", "'job", "'key-", "'r-1'", "'b-1'", "'i-1'", "'w-1'"]
        named = "|".join(f"{table.info['kind']} {name}" for name in [*names, "'s'", "1"])
        for column in table.columns:
            # Another key, and a trajectory or policy that a query asks for, is another row.
            asked = {("calls", "trajectory_id"), ("rollbacks", "policy")}
            asked |= {("rollouts", "trajectory_id"), ("workers", "heard_at")}
            asked |= {("trained_verdicts", "policy")}
            if column.name in keys or (table.name, column.name) in asked:
                continue
            kind = type(column.type).__name__.upper()
            if kind in kinds and not share():
                continue
            if store.engine.dialect.name == "postgresql":
                kinds.add(kind)
            with store.engine.begin() as connection:
                before = connection.execute(sa.select(column)).scalar_one()
                other = not before if kind == "BOOLEAN" else OTHER[kind]
                connection.execute(sa.update(table).values({column: other}))
            for read in readers[table.name]:
                assert re.search(named, await refusal(read)), (table.name, column.name)
            with store.engine.begin() as connection:
                connection.execute(sa.update(table).values({column: before}))
        for read in readers[table.name]:
            await read()


#: What each type of column may hold. PostgreSQL takes no NUL, and its text is UTF-8.
VALUES = {
    "STRING": (TEXT := st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))),
    "TEXT": TEXT,
    "FLOAT": st.just(-0.0) | st.floats(allow_nan=False) | st.integers(-(2**53), 2**53),
    "BIGINTEGER": st.integers(-(2**63), 2**63 - 1),
    "INTEGER": st.integers(-(2**31), 2**31 - 1),
    "BOOLEAN": st.booleans(),
    "BLOB": st.binary(),
}


@pytest.mark.soak
def test_a_row_that_the_disk_did_not_change_is_whole(store: Store) -> None:
    for table in META.sorted_tables:
        if table is not SCHEMA:
            rows_stay_whole(store, table)


@settings(max_examples=count(5, 200))
@given(data=st.data())
def rows_stay_whole(store: Store, table: sa.Table, data: st.DataObject) -> None:
    row: dict[str, object] = {}
    for column in table.columns:
        values = VALUES[type(column.type).__name__.upper()]
        if isinstance(column.type, sa.String) and column.type.length:
            values = TEXT.map(lambda text, most=column.type.length: text[:most])
        if column.nullable:
            values |= st.none()
        if column.name != "seal" and column is not table.autoincrement_column:
            row[column.name] = data.draw(values)
    with store.engine.connect() as connection:  # it is rolled back
        insert(connection, table, [row])
        intact(table, connection.execute(sa.select(table)).one())


async def test_so_many_versions_of_a_policy_are_pinned_and_no_more(store: Store) -> None:
    for policy in ("p", "q"):
        await store.add_policy(policy, LoraConfig(rank=4))
        for version in range(MAX_PINNED + 1):
            name = f"{policy}@{version}"
            await store.add_checkpoint(
                Checkpoint(
                    policy=policy, version=version, name=name, parent=None, created_at=1.0, bytes=1
                )
            )
    assert await store.stored_bytes() == await store.size() + 2 * (MAX_PINNED + 1)
    for version in range(MAX_PINNED):
        await store.set_pinned("p", version, True)
    with pytest.raises(
        Conflict, match=rf"p@{MAX_PINNED} is not pinned.*`langchain-art .*unpin p@0"
    ):
        await store.set_pinned("p", MAX_PINNED, True)
    await store.set_pinned("p", 3, True)  # it is already
    await store.set_pinned("q", MAX_PINNED, True)
    await store.set_pinned("p", 0, False)
    await store.set_pinned("p", MAX_PINNED, True)
    pinned = [one.version for one in await store.checkpoints("p") if one.pinned]
    assert pinned == list(range(1, MAX_PINNED + 1))


async def test_each_run_and_call_is_trained_once_unless_it_is_asked_for(
    store: Store,
) -> None:
    await store.add_trajectories([Trajectory(id="t-1"), Trajectory(id="t-2")])
    for job in ("job-1", "job-2", "job-3"):
        await store.jobs.add(job, job, TrainRequest(policy="p", groups=(("t-1",),)), [], 9)
    await store.jobs.finish("job-1", None, None, trained=["t-1"], calls=["c-1", "c-2"])
    for runs, calls in ((["t-2"], ["c-2", "c-3"]), (["t-1"], ["c-9"])):
        with pytest.raises(Conflict, match="twice"):
            await store.jobs.finish("job-2", None, None, trained=runs, calls=calls)
    assert (await store.jobs.get("job-2")).state == "queued"  # the whole of its end is undone
    first = {"c-1": {"job-1"}, "c-2": {"job-1"}}
    assert await store.jobs.trained_calls(["c-1", "c-2", "c-3"], "p") == first
    assert await store.jobs.trained_calls(["c-1", "c-2"], "q") == {}
    again = {"trained": ["t-1"], "calls": ["c-2", "c-3"]}
    await store.jobs.finish("job-3", None, None, **again, retrain=True)
    marks = {"c-1": {"job-1"}, "c-2": {"job-1", "job-3"}, "c-3": {"job-3"}}
    assert await store.jobs.trained_calls(marks, "p") == marks
    assert (await store.trajectory("t-1")).trained_by == {"p": "job-3"}


async def test_a_store_that_cannot_write_acknowledges_nothing(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'art.sqlite3'}")

    def hurry(connection: sa.Connection) -> None:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one() == 10_000
        connection.exec_driver_sql("PRAGMA busy_timeout=1000")

    await store.write(hurry)
    await store.add_calls([record("c-1")])
    with store.engine.connect() as other:  # another process's lock
        other.exec_driver_sql("PRAGMA busy_timeout=1")
        other.exec_driver_sql("BEGIN EXCLUSIVE")
        write = asyncio.create_task(store.add_calls([record("c-2")]))
        with pytest.raises(EngineUnavailable, match="nothing was acknowledged"):
            await asyncio.wait_for(write, 30)
        other.exec_driver_sql("ROLLBACK")
    await store.add_calls([record("c-3")])  # it goes on when the database does
    assert set(await store.calls(["c-1", "c-2", "c-3"])) == {"c-1", "c-3"}
    store.close()


async def test_text_that_postgresql_does_not_take_is_refused_alone(postgres: Postgres) -> None:
    store = Store(postgres.database())
    with pytest.raises(InvalidRequest, match="NUL"):
        await store.add_trajectories([Trajectory(id="t-1")], group_id="a\0b")
    assert await store.add_trajectories([Trajectory(id="t-1")], group_id="a") == 1
    store.close()


async def add_calls(store: Store, **tagged_with: str | None) -> None:
    tags = {name: CallTags(trajectory_id=run) for name, run in tagged_with.items()}
    await store.add_calls([call_records.record(name, tags=tag) for name, tag in tags.items()])


def run(name: str, *calls: str) -> Trajectory:
    turns = tuple(Turn(call_id=call) for call in calls)
    return Trajectory(id=name, turns=turns, metadata={"filler": "x" * 1000})


async def test_a_page_ends_with_so_many_bytes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.add_trajectories([run(f"t-{n}") for n in range(7)])
    for most, after, expected in ((2500, None, (2, "t-5", True)), (10, "t-1", (1, "t-0", False))):
        monkeypatch.setattr(queries, "MAX_PAGE_BYTES", most)
        page = await store.recent_trajectories(7, after=after)
        assert (len(page.items), page.last_id, page.has_more) == expected
    with pytest.raises(InvalidRequest, match="begin again"):
        await store.recent_trajectories(7, after="t-9")


async def test_a_run_is_deleted_with_the_calls_that_no_other_run_has(store: Store) -> None:
    await add_calls(store, own="a", shared="a", untagged=None, of_another="b")
    await store.add_trajectories([run("a", "own", "shared", "untagged", "of_another")])
    await store.add_trajectories([run("c", "shared")])
    await store.delete_trajectory("a")
    assert set(await store.calls(["own", "shared", "untagged", "of_another"])) == {
        "shared",
        "of_another",
    }
    with pytest.raises(NotFound):
        await store.trajectory("a")
    with pytest.raises(NotFound):
        await store.delete_trajectory("a")
    await store.delete_trajectory("c")
    await store.delete_trajectory("b")  # only its call is there
    assert await store.calls(["shared", "of_another"]) == {}
    await store.add_trajectories([run("a", "own")])  # the id is free again


async def test_a_run_is_kept_while_a_job_uses_it(store: Store) -> None:
    await store.add_trajectories([run("a")])
    request = TrainRequest(policy="p", groups=(("a",),))
    await store.jobs.add("job-1", "key-1", request, [], 99)
    with pytest.raises(Conflict, match="job-1"):
        await store.delete_trajectory("a")
    await store.jobs.cancel("job-1")
    await store.delete_trajectory("a")


async def test_an_id_with_a_nul_names_nothing(store: Store) -> None:
    for read in (store.trajectory, store.call, store.jobs.get):
        with pytest.raises((NotFound, InvalidRequest)):
            await read("a\0b")


async def test_an_assembled_run_has_the_calls_it_was_assembled_from(store: Store) -> None:
    await add_calls(store, first="a", second="a", foreign=None)
    await store.set_reward("a", Reward(reward=1.0), run("a", "first"))
    await store.set_reward("a", Reward(reward=1.0), run("a", "first", "foreign"))
    await store.delete_trajectory("a")
    assert await store.calls(["first", "second", "foreign"]) == {}


def said(id_: str, run: str, value: float | None = 1.0, **more: Any) -> Review:
    base = {"source": "langfuse", "kind": "reward", "name": "human_reward", "at": 1.0}
    return Review(**(base | {"id": id_, "trajectory": run, "value": value} | more))


async def everything(store: Store, **which: Any) -> list[Review]:
    found = await store.reviews.page(1000, **which)
    return [Review.model_validate_json(one) for one in found.items]


async def test_of_two_revisions_the_later_one_holds_whatever_comes_first(store: Store) -> None:
    await store.add_trajectories([Trajectory(id="t-1")])
    first, second = said("r-1", "t-1"), said("r-1", "t-1", 0.0, at=2.0)
    fates: list[dict[str, Any]] = []
    for one in (first, first, second, first, second):
        kept = await store.reviews.put([one])
        fates.append(kept.model_dump(exclude_defaults=True))
    expected = ("new", "unchanged", "revised", "outdated", "unchanged")
    assert fates == [{fate: 1} for fate in expected]
    assert await everything(store) == [second]
    same_time = said("r-1", "t-1", 0.25, at=2.0)
    assert (await store.reviews.put([same_time])).revised == 1
    other = said("r-1", "t-1", source="page")  # ids are each source's own
    assert (await store.reviews.put([other])).new == 1
    assert await everything(store) == [same_time, other]


async def test_what_is_about_nothing_known_is_refused_and_the_rest_is_kept(store: Store) -> None:
    turn = Turn(call_id="c-1", reply={"role": "assistant", "content": "x"})
    await store.add_trajectories([Trajectory(id="t-1", turns=(turn,))])
    sent = [
        said("a", "t-1"),
        said("b", "t-2"),
        said("c", "t-1", call_id="c-1"),
        said("d", "t-1", call_id="c-9"),
    ]
    kept = await store.reviews.put(sent)
    assert kept.new == 2
    assert [(one.id, one.reason) for one in kept.refused] == [
        ("b", "unknown_trajectory"),
        ("d", "unknown_call"),
    ]
    await store.add_trajectories([Trajectory(id="t-2")])
    kept = await store.reviews.put(sent)
    assert (kept.new, kept.unchanged, len(kept.refused)) == (1, 2, 1)


async def test_lists_are_of_runs_and_not_of_what_a_correction_is_trained_with(store: Store) -> None:
    halves = [f"{kind}:{'a' * 32}" for kind in ("call", "correction")]
    await store.add_trajectories([Trajectory(id=one) for one in (*halves, "call:mine", "t-1")])
    found = await store.recent_trajectories(10)
    assert [Trajectory.model_validate_json(one).id for one in found.items] == ["t-1", "call:mine"]
    assert [one.id for one in (await store.runs.page(RunsQuery())).runs] == ["t-1", "call:mine"]
    [known] = (await store.recent_trajectories(10, prefix="call:aa")).items
    assert Trajectory.model_validate_json(known).id == halves[0]


async def test_both_clients_put_and_read_reviews_of_real_calls(
    art_server: LiveServer, http: httpx.Client, client: ArtClient
) -> None:
    run = f"reviewed-{uuid.uuid4().hex}"
    asked = {
        "model": art_server.policy,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 2,
        "art": {"trajectory_id": run},
    }
    call = http.post("/v1/chat/completions", json=asked).raise_for_status().json()["id"]
    answer = {"role": "assistant", "content": "Hello"}
    corrected = said(
        f"c-{run}", run, None, kind="correction", name="output", call_id=call, correction=answer
    )
    lost = said("lost", "nobody")
    kept = client.put_reviews([said(f"r-{run}", run), corrected, lost])
    assert (kept.new, [one.id for one in kept.refused]) == (2, ["lost"])
    assert client.reviews(run=run) == [said(f"r-{run}", run), corrected]
    async with AsyncArtClient(art_server.base_url) as twin:
        many = [said(f"many-{run}-{i}", run) for i in range(1500)]
        assert (await twin.put_reviews(many)).new == 1500
        logged = await twin.actions(1)
        assert (await twin.put_reviews(many)).unchanged == 1500
        assert await twin.actions(1) == logged and logged[0].subject == run
        mine = await twin.reviews(policy=art_server.policy, source="langfuse")
        assert {one.id for one in many} <= {one.id for one in mine}
        assert await twin.reviews(policy="nobody") == []
        await twin.delete_trajectory(run)  # its reviews go with it
        assert await twin.reviews(run=run) == []
    unsaid = corrected.model_dump() | {"correction": None}
    refused = http.put("/v1/reviews", json={"reviews": [unsaid]})
    assert_refused(refused, "with kind='correction'")
    too_many = [said(f"{i}", run).model_dump() for i in range(1001)]
    assert_refused(http.put("/v1/reviews", json={"reviews": too_many}), "1000")


def assert_refused(answer: httpx.Response, words: str) -> None:
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
