"""Why calls do not learn, as it is exported: the client's words for what the server will count."""

from typing import Any

import pytest

from langchain_art.training.fit_export import exclusions
from langchain_art.training.fit_state import PendingStep
from langchain_art.wire import Standardized, TrainConfig, Trajectory, TrajectoryGroup, Turn


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
                "a": ["groups.single"] * 2,
                "b": ["runs.without_advantage"] * 2,
                "c": ["runs.unscored"] * 2,
                "d": ["runs.failed"] * 2,
            },
        ),
    ],
)
def test_advantages_that_are_given_decide_what_learns(advantages: Any, expected: Any) -> None:
    group = TrajectoryGroup(id="g", trajectories=RUNS)
    learns = {"p": TrainConfig()}
    pending = PendingStep(step=1, groups=(group,), configs=learns, advantages=advantages)
    assert exclusions(pending) == expected


def test_a_call_is_judged_by_the_config_of_the_policy_that_sampled_it() -> None:
    scored = TrainConfig(advantage=Standardized(scores={"style": 1.0}))
    configs = {"p": TrainConfig(), "q": scored}
    turns = (
        RUNS[0].turns[0],
        RUNS[0].turns[0].model_copy(update={"model": "q@1"}),
        RUNS[0].turns[0].model_copy(update={"model": "frozen@1"}),
    )
    runs = tuple(
        run.model_copy(update={"turns": turns, "reward": float(i), "status": "completed"})
        for i, run in enumerate(RUNS)
    )
    pending = PendingStep(
        step=1, groups=(TrajectoryGroup(id="g", trajectories=runs),), configs=configs
    )
    assert exclusions(pending)["a"] == [None, "runs.unscored", "calls.other_policy"]
