"""Lists by page, and what is deleted with a run or a policy, on both databases."""

import json

import pytest

from langchain_art.errors import Conflict, InvalidRequest, NotFound
from langchain_art.wire import (
    CallTags,
    Checkpoint,
    LoraConfig,
    Reward,
    TrainRequest,
    Trajectory,
    Turn,
)
from langchain_art_server.storage import queries
from langchain_art_server.storage.store import Store
from tests.support.call_records import record


async def add_calls(store: Store, **tagged_with: str | None) -> None:
    """Calls, each tagged with a run's id or with none."""
    calls = [record(name, tags=CallTags(trajectory_id=run)) for name, run in tagged_with.items()]
    await store.add_calls(calls)


def run(name: str, *calls: str) -> Trajectory:
    turns = tuple(Turn(call_id=call) for call in calls)
    return Trajectory(id=name, turns=turns, metadata={"filler": "x" * 1000})


async def test_trajectories_come_by_page_the_newest_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.add_trajectories([run(f"t-{n}") for n in range(7)])
    found: list[str] = []
    after, more = None, True
    while more:
        page = await store.recent_trajectories(3, after=after)
        found += [json.loads(body)["id"] for body in page.items]
        after, more = page.last_id, page.has_more
    assert found == [f"t-{n}" for n in reversed(range(7))]
    monkeypatch.setattr(queries, "MAX_PAGE_BYTES", 2500)  # of two of them
    page = await store.recent_trajectories(7)
    assert (len(page.items), page.last_id, page.has_more) == (2, "t-5", True)
    monkeypatch.setattr(queries, "MAX_PAGE_BYTES", 10)
    page = await store.recent_trajectories(7, after="t-1")
    assert (len(page.items), page.last_id, page.has_more) == (1, "t-0", False)
    with pytest.raises(InvalidRequest, match="begin again"):
        await store.recent_trajectories(7, after="t-9")


async def test_jobs_come_by_page_the_oldest_first(store: Store) -> None:
    for n in range(5):
        request = TrainRequest(policy="p" if n else "q", groups=(("t",),))
        await store.jobs.add(f"job-{n}", f"key-{n}", request, [], 99)
    page = await store.jobs.page(2, policy="p")
    assert ([job.id for job in page.items], page.has_more) == (["job-1", "job-2"], True)
    page = await store.jobs.page(2, page.last_id, "p")
    assert ([job.id for job in page.items], page.has_more) == (["job-3", "job-4"], False)
    with pytest.raises(InvalidRequest):
        await store.jobs.page(2, "job-9")


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


async def test_an_assembled_run_has_the_calls_it_was_assembled_from(store: Store) -> None:
    await add_calls(store, first="a", second="a", foreign=None)
    await store.set_reward("a", Reward(reward=1.0), run("a", "first"))
    await store.set_reward("a", Reward(reward=1.0), run("a", "first", "foreign"))
    await store.delete_trajectory("a")
    assert await store.calls(["first", "second", "foreign"]) == {}


async def test_a_policy_is_kept_while_a_job_of_it_has_not_ended(store: Store) -> None:
    await store.add_policy("p", LoraConfig(rank=4))
    point = Checkpoint(policy="p", version=0, name="p@0", parent=None, created_at=1.0, bytes=10)
    await store.add_checkpoint(point)
    assert await store.stored_bytes() == await store.size() + 10
    request = TrainRequest(policy="p", groups=(("a",),))
    await store.jobs.add("job-1", "key-1", request, [], 99)
    for refuses in (store.refuse_open_jobs, store.delete_policy):
        with pytest.raises(Conflict, match="job-1"):
            await refuses("p")
    await store.jobs.cancel("job-1")
    await store.delete_policy("p")
    assert (await store.policies(), await store.checkpoints("p")) == ({}, [])
