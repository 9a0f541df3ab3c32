"""Why calls do not learn, as it is exported: the client's words for what the server will count."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_art.training.fit_export import exclusions
from langchain_art.training.fit_state import PendingStep
from langchain_art.wire import TrainConfig, Trajectory, TrajectoryGroup, Turn


def run(name: str, reward: float | None, status: Any = "completed") -> Trajectory:
    turns = tuple(Turn(call_id=f"{name}-{k}", node="writer", model="p@0") for k in range(2))
    return Trajectory(id=name, turns=turns, reward=reward, status=status)


RUNS = (run("a", 1.0), run("b", 1.0), run("c", None), run("d", None, "failed"))


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        (
            None,
            {
                "a": ["groups.zero_variance"] * 2,
                "b": ["groups.zero_variance"] * 2,
                "c": ["runs.unscored"] * 2,
                "d": ["runs.failed"] * 2,
            },
        ),
        (
            {"a": (1.0, None), "c": ((0.5, 0.0), 0.0)},
            {
                "a": [None, "calls.without_advantage"],
                "b": ["runs.without_advantage"] * 2,
                "c": [None, None],
                "d": ["runs.failed"] * 2,
            },
        ),
        (
            {"a": (0.0, 0.0)},
            {
                "a": ["groups.zero_variance"] * 2,
                "b": ["runs.without_advantage"] * 2,
                "c": ["runs.unscored"] * 2,
                "d": ["runs.failed"] * 2,
            },
        ),
    ],
)
def test_advantages_that_are_given_decide_what_learns(advantages: Any, expected: Any) -> None:
    group = TrajectoryGroup(id="g", trajectories=RUNS)
    pending = PendingStep(step=1, groups=(group,), config=TrainConfig(), advantages=advantages)
    assert exclusions(pending, ["p"]) == expected
