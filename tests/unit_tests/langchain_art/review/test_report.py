"""Judges are compared with people within scenarios, and trusted as far as the interval says."""

from langchain_art.evaluators.calibration import Agreement, Correlation
from langchain_art.review.report import bands_of, judge_agreement, trust
from langchain_art.statistics.intervals import wilson
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


def test_a_band_is_trusted_where_people_agree_beyond_what_is_asked() -> None:
    judged = {f"r{i}": i / 40 for i in range(40)}
    human: dict[str, float | None] = {f"r{i}": 0.0 for i in range(8)}  # as the judge says
    human |= {f"r{i}": float(i % 2) for i in range(20, 28)}  # one half otherwise
    human |= {"r30": 1.0, "r31": None}  # one alone, and one on which people disagree
    low, second, third, high = bands_of(judged, human)
    bands = [(one.reviewed, one.agree, one.trusted) for one in (low, second, third, high)]
    assert bands == [(8, 8, True), (0, 0, False), (8, 4, False), (1, 1, False)]
    assert low.interval == wilson(8, 8) and second.interval is None
    assert low.open == {"r8": 0.2, "r9": 0.225}
    assert "r31" not in high.open and len(high.open) == 8
    assert (low.low, low.high, high.high) == (0.0, second.low, judged["r39"])
    assert not any(one.trusted for one in bands_of(judged, human, at_least=0.7))
    swapped = bands_of(judged, dict.fromkeys(human, 1.0), good=0.9)
    assert swapped[0].agree == 0 and not swapped[0].trusted


def test_equal_scores_are_in_one_band() -> None:
    judged = {"a": 0.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 1.0}
    bands = bands_of(judged, dict.fromkeys("bcde", 1.0))
    assert [len(one.open) + one.reviewed for one in bands] == [1, 4]
    assert [one.trusted for one in bands] == [False, True]
    assert len(bands_of({"a": 0.5, "b": 0.5}, {})) == 1
    assert bands_of({}, {}) == []
