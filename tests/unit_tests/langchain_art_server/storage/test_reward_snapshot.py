from dataclasses import asdict

import pytest
from pydantic_core import from_json, to_json

from langchain_art.wire import Reward, TrainRequest, Trajectory, Turn
from langchain_art_server.storage.reward_snapshot import RewardSnapshot, changed, rewards_in_words


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
