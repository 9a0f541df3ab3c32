from dataclasses import asdict
from pathlib import Path

import pytest
from pydantic_core import from_json, to_json

from langchain_art.errors import Conflict, InvalidRequest
from langchain_art.wire import (
    Reward,
    Standardized,
    StepSeconds,
    TrainConfig,
    TrainRequest,
    Trajectory,
    Turn,
)
from langchain_art_server.storage.reward_snapshot import RewardSnapshot, changed, rewards_in_words
from langchain_art_server.storage.store import Store


def run(*rewards: float | None, **fields: object) -> Trajectory:
    turns = tuple(Turn(call_id=f"c-{i}", reward=r) for i, r in enumerate(rewards))
    return Trajectory(id="t-1", turns=turns, **fields)  # type: ignore[arg-type]


def asked(**rewards: object) -> TrainRequest:
    return TrainRequest(policy="p", groups=(("t-1",),), **rewards)  # type: ignore[arg-type]


def given(told: Trajectory) -> list[float | None]:
    return [turn.reward for turn in told.turns]


def test_only_what_is_given_changes() -> None:
    old = run(1.0, None, reward=0.5, scores={"a": 1.0}, status="truncated", scenario="s")
    told = changed(old, Reward(turns={"c-1": 2.0}))
    assert given(told) == [1.0, 2.0]
    assert told.model_copy(update={"turns": old.turns}) == old
    told = changed(old, Reward(reward=None, scores={"b": 0.0}, status="completed"))
    assert (told.reward, told.scores, told.status) == (None, {"a": 1.0, "b": 0.0}, "completed")
    assert given(changed(old, Reward(turns={"c-0": None}))) == [None, None]


def test_calls_that_join_late_leave_rewards_where_they_were() -> None:
    late = [Turn(call_id="c-2"), *run(None, None).turns]
    told = changed(run(1.0, None), Reward(turns={"c-2": 3.0}), late)
    assert [(t.call_id, t.reward) for t in told.turns] == [
        ("c-2", 3.0),
        ("c-0", 1.0),
        ("c-1", None),
    ]


def test_a_reward_for_no_call_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"\['x'\].* 't-1' does not have.* its 2 calls"):
        changed(run(None, None), Reward(turns={"c-0": 1.0, "x": 1.0}))
    lost = Trajectory(id="t-1", turns=(Turn(call_id=None),))
    with pytest.raises(InvalidRequest):
        changed(lost, Reward(turns={"c-0": 1.0}))


def test_rewards_that_differ_differ_in_words() -> None:
    seen = [run(), run(reward=0.0), run(None), run(0.0), run(0.0, 1.0), run(1.0, 0.0)]
    words = [rewards_in_words(one) for one in seen]
    assert words[0] == words[2] == "None" and len(set(words)) == 5
    assert words[4] == "None and {'c-0': 0.0, 'c-1': 1.0} of its calls"


@pytest.mark.parametrize(
    "then",
    [
        run(1.0, None, reward=0.5, scores={"a": 1.0}, status="failed"),
        run(None, None, reward=None),
        run(),
    ],
)
def test_a_run_stands_as_it_stood_whatever_came_after(then: Trajectory) -> None:
    kept = RewardSnapshot(**from_json(to_json(asdict(RewardSnapshot.of(then, asked())))))
    now = changed(
        then,
        Reward(
            reward=7.0,
            scores={"a": 7.0, "b": 7.0},
            status="truncated",
            turns={turn.call_id or "": 7.0 for turn in then.turns},
        ),
    )
    assert now != then
    assert kept.on(now) == then


async def test_a_job_keeps_its_runs_as_they_were_scored(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'art.sqlite3'}"
    store = Store(url)
    then = run(0.0, 1.0, reward=0.5, scores={"a": 1.0})
    await store.add_trajectories([then])
    config = TrainConfig(advantage=Standardized(scores={"a": 1.0}))
    request = TrainRequest(policy="p", groups=(("t-1",),), config=config)
    await store.jobs.add("job-1", "k", request, [then], 9)
    await store.set_reward("t-1", Reward(reward=0.0, scores={"a": 0.0}, turns={"c-0": 9.0}))
    store.close()
    store = Store(url)  # another process, after a crash
    now = (await store.trajectory("t-1")).trajectory
    again, scored, target = await store.jobs.payload("job-1")
    assert (again, target) == (request, None)
    assert (now.scores, given(now)) == ({"a": 0.0}, [9.0, 1.0])
    assert scored["t-1"].on(now) == then
    store.close()


def test_a_jobs_own_reward_stands_for_those_of_the_run_and_its_calls() -> None:
    old = run(1.0, None, reward=0.5, scores={"a": 1.0})
    told = RewardSnapshot.of(old, asked(rewards={"t-1": 0.0})).on(old)
    assert (told.reward, given(told), told.scores) == (0.0, [None, None], {"a": 1.0})
    told = RewardSnapshot.of(old, asked(turns={"c-1": 0.0, "c-9": 4.0})).on(old)
    assert (told.reward, given(told)) == (None, [None, 0.0])
    told = RewardSnapshot.of(old, asked(rewards={"t-1": 0.25}, turns={"c-0": 0.0})).on(old)
    assert (told.reward, given(told)) == (0.25, [0.0, None])
    assert RewardSnapshot.of(old, asked(turns={"c-9": 4.0})).on(old) == old
    assert old.total_return == 1.5


async def test_rewards_of_calls_for_one_job_are_stored_with_it_and_are_part_of_it(
    tmp_path: Path,
) -> None:
    store = Store(f"sqlite:///{tmp_path / 'art.sqlite3'}")
    stored = run(1.0, None, reward=0.5)
    await store.add_trajectories([stored])
    job = await store.jobs.add("job-1", "k", asked(turns={"c-1": 0.25}), [stored], 9)
    took = asked(turns={"c-1": 0.25}, seconds=StepSeconds(rollout=9.0))  # the same batch
    again = await store.jobs.add("job-2", "k", took, [stored], 9)
    assert again.id == job.id
    with pytest.raises(Conflict):
        await store.jobs.add("job-3", "k", asked(turns={"c-1": 0.5}), [stored], 9)
    _, scored, _ = await store.jobs.payload("job-1")
    told = scored["t-1"].on(stored)
    assert (told.reward, given(told)) == (None, [None, 0.25])
    assert (await store.trajectory("t-1")).trajectory == stored
    store.close()
