"""What people say of runs is kept once, in its latest revision, and goes with its run."""

import uuid
from typing import Any

import httpx
import pytest

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import Conflict
from langchain_art.wire import (
    LoraConfig,
    Review,
    ReviewTraining,
    TrainRequest,
    TrainResult,
    Trajectory,
    Turn,
)
from langchain_art_server.storage.job_store import ReviewStep
from langchain_art_server.storage.review_store import VerdictMark
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


async def test_a_mark_stays_if_its_job_has_trained_the_verdict(store: Store) -> None:
    runs = [Trajectory(id=f"t-{i}") for i in range(3)]
    await store.add_trajectories(runs)
    await store.add_policy("p", LoraConfig())
    await store.reviews.put([said(f"r-{i}", f"t-{i}") for i in range(3)])
    marks = [
        VerdictMark(run.id, "", "reward", "human_reward", "1.0", run.id, [("langfuse", f"r-{i}")])
        for i, run in enumerate(runs)
    ]
    request = TrainRequest(policy="p", groups=(("t-0", "t-1", "t-2"),))
    asked = ReviewTraining(policy="p")
    step = ReviewStep("job-1", request, runs, marks)
    added = await store.jobs.add_reviewed("key", asked, [step], [], 9)
    assert added is not None and [job.id for job in added] == ["job-1"]
    again = ReviewStep("job-2", request, runs, marks)
    assert await store.jobs.add_reviewed("key", asked, [again], [], 9) == added
    assert (
        await store.jobs.add_reviewed("other", asked, [again], [], 9) is None
    )  # ordered meanwhile
    with pytest.raises(Conflict, match="another request"):
        await store.jobs.reviewed("key", ReviewTraining(policy="p", correction_steps=9))
    assert {mark.state for mark in await store.reviews.marks("p")} == {"queued"}
    await store.jobs.begin("job-1", 0, 1)
    result = TrainResult(policy="p", version=1, metrics={}, excluded={"groups.stale": 1})
    await store.jobs.finish("job-1", result, None, trained=["t-0", "t-1"])  # t-2 was stale by then
    known = await store.reviews.marks("p")
    assert [(mark.trajectory, mark.version) for mark in known] == [("t-0", 1), ("t-1", 1)]
    # A pull by another --name, or a comment, says nothing else of the run.
    same = said("r-0", "t-0", at=2.0, kind="score", comment="why")
    kept = await store.reviews.put([same])
    assert (kept.revised, kept.trained) == (1, {})
    kept = await store.reviews.put([said(f"r-{i}", f"t-{i}", 0.0, at=2.0) for i in range(3)])
    assert kept.trained == {"r-0": ("p@1",), "r-1": ("p@1",)}
    await store.delete_trajectory("t-0")
    assert [mark.trajectory for mark in await store.reviews.marks("p")] == ["t-1"]
    failed = ReviewStep("job-3", request, runs, marks[2:])
    assert await store.jobs.add_reviewed("third", asked, [failed], known, 9)
    await store.jobs.finish("job-3", None, "no space", retryable=True)
    assert [mark.trajectory for mark in await store.reviews.marks("p")] == ["t-1"]
    [job] = await store.jobs.reviewed("third", asked)
    assert job.state == "failed"  # not queued again: by now another order may train its verdicts


async def test_lists_are_of_runs_and_not_of_what_a_correction_is_trained_with(store: Store) -> None:
    halves = [f"{kind}:{'a' * 32}" for kind in ("call", "correction")]
    await store.add_trajectories([Trajectory(id=one) for one in (*halves, "call:mine", "t-1")])
    found = await store.recent_trajectories(10)
    assert [Trajectory.model_validate_json(one).id for one in found.items] == ["t-1", "call:mine"]
    assert [one.id for one in (await store.runs.page(RunsQuery())).runs] == ["t-1", "call:mine"]
    [known] = (await store.recent_trajectories(10, prefix="call:aa")).items
    assert Trajectory.model_validate_json(known).id == halves[0]


async def test_reviews_go_with_their_run(store: Store) -> None:
    await store.add_trajectories([Trajectory(id="t-1"), Trajectory(id="t-2")])
    await store.reviews.put([said("a", "t-1"), said("b", "t-2")])
    await store.delete_trajectory("t-1")
    assert await everything(store) == [said("b", "t-2")]


async def test_a_page_goes_on_where_the_last_one_ended(store: Store) -> None:
    await store.add_trajectories([Trajectory(id="t-1")])
    sent = [said(f"r-{i}", "t-1") for i in range(5)]
    await store.reviews.put(sent)
    first = await store.reviews.page(3)
    assert first.has_more and first.last_id is not None
    await store.reviews.put([said("late", "t-1")])
    rest = await store.reviews.page(3, after=int(first.last_id))
    ids = [Review.model_validate_json(one).id for one in (*first.items, *rest.items)]
    assert ids == [*(one.id for one in sent), "late"]
    assert not rest.has_more


async def test_both_clients_put_and_read_reviews_of_real_calls(art_server: LiveServer) -> None:
    run = f"reviewed-{uuid.uuid4().hex}"
    with art_server.http() as http:
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
        with ArtClient(art_server.base_url) as client:
            lost = said("lost", "nobody")
            kept = client.put_reviews([said(f"r-{run}", run), corrected, lost])
            assert (kept.new, [one.id for one in kept.refused]) == (2, ["lost"])
            assert client.reviews(run=run) == [said(f"r-{run}", run), corrected]
        async with AsyncArtClient(art_server.base_url) as client:
            many = [said(f"many-{run}-{i}", run) for i in range(1500)]
            assert (await client.put_reviews(many)).new == 1500
            logged = await client.actions(1)
            assert (await client.put_reviews(many)).unchanged == 1500
            assert await client.actions(1) == logged and logged[0].subject == run
            mine = await client.reviews(policy=art_server.policy, source="langfuse")
            assert {one.id for one in many} <= {one.id for one in mine}
            assert await client.reviews(policy="nobody") == []
            await client.delete_trajectory(run)
            assert await client.reviews(run=run) == []
        unsaid = corrected.model_dump() | {"correction": None}
        refused = http.put("/v1/reviews", json={"reviews": [unsaid]})
        assert_refused(refused, "with kind='correction'")
        too_many = [said(f"{i}", run).model_dump() for i in range(1001)]
        assert_refused(http.put("/v1/reviews", json={"reviews": too_many}), "1000")


def assert_refused(answer: httpx.Response, words: str) -> None:
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
