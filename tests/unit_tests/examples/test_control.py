"""A demo's control deals out the rewards of a group at random, and keeps each node's."""

from __future__ import annotations

from examples.support.control import shuffled
from langchain_art import Trajectory, TrajectoryGroup, Turn


def turn(node: str, reward: float) -> Turn:
    return Turn(call_id=None, node=node, reply={"role": "assistant", "content": ""}, reward=reward)


async def test_rewards_are_dealt_out_within_the_group_and_the_node() -> None:
    runs = tuple(
        Trajectory(
            id=str(n), reward=float(n), turns=(turn("a", n), turn("a", 1), turn("b", 10 * n))
        )
        for n in range(8)
    )
    seen: set[tuple[float | None, ...]] = set()
    for number in range(4):
        group = TrajectoryGroup(id=str(number), trajectories=runs)
        dealt = (await shuffled(0)(group)).trajectories
        assert dealt == (await shuffled(0)(group)).trajectories
        assert sorted(run.reward or 0.0 for run in dealt) == [float(n) for n in range(8)]
        assert all(run.turns[0].reward is None for run in dealt)  # a node's last call has its sum
        for last, sums in ((1, range(1, 9)), (2, range(0, 80, 10))):
            assert sorted(run.turns[last].reward or 0.0 for run in dealt) == list(sums)
        seen.add(tuple(run.reward for run in dealt))
    assert len(seen) == 4 and tuple(run.reward for run in runs) not in seen
