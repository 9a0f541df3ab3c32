"""Advantages of branched runs against a naive twin, on random trees; and what settings may say."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_art import Trainer
from langchain_art.errors import ConfigError
from langchain_art.rollout.forks import FORK, Forks
from langchain_art.training.batch.advantage_hook import advantages_of, check_hook
from langchain_art.training.batch.fork_advantages import fork_advantages
from langchain_art.wire import TrainConfig, Trajectory, TrajectoryGroup, Turn

Path = list[tuple[str, int]]


@dataclass
class Tree:
    """A run of `calls` calls, and continuations: how many calls before, how many of its own."""

    reward: float | None
    calls: int
    branches: list[tuple[int, int, float | None]] = field(default_factory=list)


rewards = st.one_of(st.none(), st.floats(-10, 10), st.sampled_from([0.0, 1.0]))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    calls = draw(st.integers(1, 5))
    branch = st.tuples(st.integers(0, calls - 1), st.integers(0, 4), rewards)
    return Tree(draw(rewards), calls, draw(st.lists(branch, max_size=4)))


def group_of(some: list[Tree]) -> TrajectoryGroup:
    runs: list[Trajectory] = []
    for number, tree in enumerate(some):
        name = f"t{number}"
        turns = tuple(Turn(call_id=f"{name}-{k}") for k in range(tree.calls))
        runs.append(Trajectory(id=name, turns=turns, reward=tree.reward))
        for b, (before, own, reward) in enumerate(tree.branches):
            id = f"{name}b{b}"
            about = {FORK: {"of": name, "node": "choose", "turns": before}}
            turns = tuple(Turn(call_id=f"{id}-{k}") for k in range(own))
            runs.append(Trajectory(id=id, turns=turns, reward=reward, metadata=about))
    return TrajectoryGroup(id="g", trajectories=tuple(runs))


def naive(some: list[Tree]) -> dict[tuple[str, int], float | None]:
    """Each leaf as its whole path from the root; what a call gets is averaged over these paths."""
    leaves: list[tuple[int, float, Path]] = []
    calls: list[tuple[str, int]] = []
    for number, tree in enumerate(some):
        trunk: Path = [(f"t{number}", k) for k in range(tree.calls)]
        calls += trunk
        if tree.reward is not None:
            leaves.append((number, tree.reward, trunk))
        for b, (before, own, reward) in enumerate(tree.branches):
            mine: Path = [(f"t{number}b{b}", k) for k in range(own)]
            calls += mine
            if reward is not None:
                leaves.append((number, reward, trunk[:before] + mine))
    found: dict[tuple[str, int], float | None] = {}
    for call in calls:
        total, count = 0.0, 0
        for number, reward, path in leaves:
            if call not in path:
                continue
            tree_rewards = [r for n, r, _ in leaves if n == number]
            all_rewards = [r for _, r, _ in leaves]
            total += reward - sum(tree_rewards) / len(tree_rewards)
            total += reward - sum(all_rewards) / len(all_rewards)
            count += 1
        found[call] = total / count if count else None
    return found


def by_call(group: TrajectoryGroup) -> dict[tuple[str, int], float | None]:
    given = fork_advantages(group)
    assert [len(one) for one in given] == [len(run.turns) for run in group.trajectories]
    return {
        (run.id, k): value
        for run, one in zip(group.trajectories, given, strict=True)
        for k, value in enumerate(one)
    }


@settings(max_examples=300, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=4))
def test_random_trees_equal_the_naive_twin(some: list[Tree]) -> None:
    assert by_call(group_of(some)) == {
        call: None if value is None else pytest.approx(value, rel=1e-12, abs=1e-12)
        for call, value in naive(some).items()
    }


@settings(max_examples=100, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3), st.floats(-5, 5), st.randoms())
def test_neither_a_constant_nor_the_order_of_runs_changes_them(
    some: list[Tree], more: float, order: object
) -> None:
    group = group_of(some)
    runs = [
        run if run.reward is None else run.model_copy(update={"reward": run.reward + more})
        for run in group.trajectories
    ]
    order.shuffle(runs)  # type: ignore[attr-defined]
    moved = by_call(group.model_copy(update={"trajectories": tuple(runs)}))
    assert moved == {
        call: None if value is None else pytest.approx(value, abs=1e-9)
        for call, value in by_call(group).items()
    }


def test_a_decision_gets_the_difference_and_what_came_before_the_trees_mean() -> None:
    """Two trees of two leaves each: one decides well once, the other never."""
    group = group_of([Tree(1.0, 2, [(1, 1, 0.0)]), Tree(0.0, 2, [(1, 1, 0.0)])])
    # leaves: 1, 0 | 0, 0; the mean of all is 1/4, of the first tree 1/2
    assert fork_advantages(group) == [[0.25, 1.25], [-0.75], [-0.25, -0.25], [-0.25]]


def test_without_branches_it_is_the_advantage_mean() -> None:
    group = group_of([Tree(1.0, 2), Tree(0.0, 1)])
    assert fork_advantages(group) == [[0.5, 0.5], [-0.5]]


async def test_what_it_gives_is_what_a_step_takes() -> None:
    group = group_of([Tree(1.0, 2, [(1, 1, 0.0), (0, 1, None)]), Tree(None, 1)])
    found = await advantages_of(fork_advantages, group)
    assert found == {"t0": (0.0, 1.0), "t0b0": (-1.0,), "t0b1": (None,), "t1": (None,)}


def test_forks_stand_alone() -> None:
    forks, config = Forks(at=("a",)), {"p": TrainConfig()}
    assert check_hook(None, forks, config) is fork_advantages
    with pytest.raises(ConfigError, match="got both advantages= and forks="):
        check_hook(lambda group: [], forks, config)
    with pytest.raises(ConfigError, match=r"forks= together with TrainConfig\(credit=…\)"):
        check_hook(None, forks, {"p": TrainConfig(credit="turn")})
    with pytest.raises(ConfigError, match=r"got forks=\('a',\), expected Forks"):
        Trainer("p", forks=("a",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="group_size=1, expected group_size of at least 2"):
        Trainer("p", group_size=1)
    Trainer("p", group_size=1, forks=forks)
