"""Judges are compared with people within scenarios, and trusted as far as the interval says."""

from langchain_art.evaluators.calibration import Agreement, Correlation
from langchain_art.review.report import judge_agreement, trust
from langchain_art.wire import Trajectory

HUMAN = {f"{scenario}-{i}": i / 4 for scenario in "abcd" for i in range(4)}


def runs(scenario: bool = True) -> list[Trajectory]:
    return [
        Trajectory(
            id=id_,
            scenario=id_[0] if scenario else None,
            # Scenarios differ in level: only within one of them does the order say something.
            reward=value + ord(id_[0]),
            scores={"upside down": -value, "human_reward": value},
        )
        for id_, value in HUMAN.items()
    ]


def test_a_judge_is_compared_within_scenarios() -> None:
    found, across, missing = judge_agreement(runs(), HUMAN)
    assert not across and not missing
    assert set(found) == {"reward", "upside down"}  # and people are not compared with themselves
    assert found["reward"].kendall.value == 1.0
    assert found["upside down"].kendall.value == -1.0
    assert trust(found["reward"]) == "ranks runs as people do, beyond chance"
    assert "do not train on it" in trust(found["upside down"])


def test_runs_of_different_scenarios_are_compared_only_if_there_are_no_siblings() -> None:
    found, across, _ = judge_agreement(runs(scenario=False), HUMAN)
    assert across and found["reward"].runs == len(HUMAN)
    lonely, across, missing = judge_agreement(runs()[:1], HUMAN)
    assert (lonely, across, missing) == ({}, False, ["reward", "upside down"])


def test_trust_needs_an_interval_that_leaves_out_chance() -> None:
    def agreement(*interval: float | None) -> Agreement:
        one = Correlation(*interval)  # type: ignore[arg-type]
        return Agreement(one, one, runs=4, groups=1)

    assert "review more runs" in trust(agreement(0.3, -0.1, 0.6))
    assert "cannot be told" in trust(agreement(None, None, None))
