"""What people say of runs is kept once, in its latest revision, and goes with its run."""

import uuid
from typing import Any

import httpx

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.sync_client import ArtClient
from langchain_art.wire import (
    Review,
    Trajectory,
    Turn,
)
from langchain_art_server.storage.run_list import RunsQuery
from langchain_art_server.storage.store import Store
from tests.support.live_server import LiveServer


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
