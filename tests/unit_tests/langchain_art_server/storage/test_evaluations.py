"""Runs of evaluations are found by the versions that were evaluated, as they are now."""

import pytest

from langchain_art.statistics.intervals import mean_of_scenarios
from langchain_art.wire import Reward, Trajectory
from langchain_art_server.storage.run_list import EvaluatedRun
from langchain_art_server.storage.store import Store


def evaluated(name: str, scenario: str | None, reward: float | None, versions: str | None) -> Trajectory:
    marked = {} if versions is None else {"evaluation": versions}
    return Trajectory(id=name, scenario=scenario, reward=reward, metadata=marked)


EVALUATED = [
    evaluated("a", "s", 0.0, "p@0"),
    evaluated("b", "s", 1.0, "p@0"),
    evaluated("c", "t", 0.25, "p@0"),
    evaluated("d", None, None, "p@0"),
    evaluated("e", "s", 1.0, "p@1 + q@1"),
    evaluated("f", "s", 1.0, None),  # of training
]


async def test_evaluations_are_those_of_the_runs_now(store: Store) -> None:
    assert await store.runs.evaluations() == []
    await store.add_trajectories(EVALUATED)
    first, second = await store.runs.evaluations()
    expected = mean_of_scenarios([[0.0, 1.0], [0.25]])
    assert (first.versions, first.mean, first.ci95) == ("p@0", expected.mean, expected.ci95)
    assert (first.runs, first.scenarios) == (3, 2)
    assert (second.versions, second.mean, second.ci95) == ("p@1 + q@1", 1.0, None)
    assert await store.runs.evaluated("p@0") == [
        EvaluatedRun("a", "s", 0.0, False),
        EvaluatedRun("b", "s", 1.0, False),
        EvaluatedRun("c", "t", 0.25, False),
        EvaluatedRun("d", "run d", None, False),
    ]
    assert await store.runs.evaluated("p@") == []
    await store.set_reward("c", Reward(reward=0.75))  # no run came, none went
    assert (await store.runs.evaluations())[0].mean == pytest.approx(1.75 / 3)
    await store.delete_trajectory("e")
    assert [one.versions for one in await store.runs.evaluations()] == ["p@0"]
    # A run that an evaluation has scored afterwards: of a graph on another server.
    await store.set_reward("f", Reward(reward=1.0, metadata={"evaluation": "p@2"}))
    assert [one.versions for one in await store.runs.evaluations()] == ["p@0", "p@2"]

    await store.delete_trajectory("f")
    # Rewards that change places change the interval alone.
    places = [evaluated(name, name[0], float(name == "s1"), "q") for name in ("s1", "s2", "t1")]
    await store.add_trajectories(places)
    before = (await store.runs.evaluations())[1].ci95
    await store.set_reward("s1", Reward(reward=0.0))
    await store.set_reward("t1", Reward(reward=1.0))
    [_, now] = await store.runs.evaluations()
    assert now.ci95 == mean_of_scenarios([[0.0, 0.0], [1.0]]).ci95 != before
