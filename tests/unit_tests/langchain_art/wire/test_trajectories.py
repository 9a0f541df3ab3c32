from __future__ import annotations

import pytest

from langchain_art.wire import Trajectory, Turn


@pytest.mark.parametrize(
    ("own", "turns", "total"),
    [
        (None, [], None),
        (None, [None], None),
        (0.0, [None], 0.0),
        (None, [0.25, 0.5], 0.75),
        (1.0, [0.25, None], 1.25),
        (0.0, [-1.0], -1.0),
    ],
)
def test_the_total_return_is_the_runs_and_its_calls(
    own: float | None, turns: list[float | None], total: float | None
) -> None:
    told = tuple(Turn(reward=reward) for reward in turns)
    assert Trajectory(id="t", turns=told, reward=own).total_return == total


def test_what_the_graph_threw_away_is_worth_nothing() -> None:
    thrown = Turn(reward=9.0, excluded_because="retried")
    assert Trajectory(id="t", turns=(thrown,)).total_return is None
    assert Trajectory(id="t", turns=(thrown, Turn(reward=1.0)), reward=1.0).total_return == 2.0
