"""Two versions compared: the same figures as by numpy, in 64 bits, from the same runs."""

import random
from collections import defaultdict

import numpy as np
import pytest

from langchain_art_server.page.evaluations import compare
from langchain_art_server.storage.run_list import EvaluatedRun

NAMES = ("p@1", "p@3 + q@2")


def runs_of(seed: int, scenarios: range, times: int, worth: float) -> list[EvaluatedRun]:
    draw = random.Random(seed)
    return [
        EvaluatedRun(
            f"{seed}-{scenario}-{k}",
            f"s-{scenario}",
            None if draw.random() < 0.1 else draw.gauss(worth, 0.3),
            False,
        )
        for scenario in scenarios
        for k in range(times)
    ]


def means(runs: list[EvaluatedRun]) -> dict[str, float]:
    found = defaultdict[str, list[float]](list)
    for run in runs:
        if run.reward is not None:
            found[run.scenario].append(run.reward)
    return {name: float(np.mean(np.array(given, np.float64))) for name, given in found.items()}


def test_the_difference_is_that_of_a_numpy_twin() -> None:
    runs = [runs_of(1, range(40), 2, 0.2), runs_of(2, range(5, 45), 3, 0.5)]
    found = compare(NAMES, runs, [[], []], None)
    assert found.comparison is not None
    old, new = map(means, runs)
    shared = sorted(old.keys() & new.keys())
    differences = np.array([new[name] - old[name] for name in shared], np.float64)
    assert found.comparison.paired
    assert found.comparison.scenarios == len(shared) == len(found.scenarios)
    assert found.comparison.left_out == len(old.keys() ^ new.keys()) > 0
    assert found.comparison.difference == pytest.approx(differences.mean(), rel=1e-12)
    half = 1.959963984540054 * differences.std(ddof=1) / np.sqrt(len(differences))
    assert found.comparison.ci95 == pytest.approx(half, rel=1e-12)
    assert (found.wins, found.losses) == ((differences > 0).sum(), (differences < 0).sum())
    assert [one.difference for one in found.scenarios] == pytest.approx(sorted(differences))
    for side, some in zip((found.before, found.after), runs, strict=True):
        rewards = np.array([run.reward for run in some if run.reward is not None], np.float64)
        spread = np.array(list(means(some).values()), np.float64)
        assert side.mean == pytest.approx(rewards.mean(), rel=1e-12)
        half = 1.959963984540054 * spread.std(ddof=1) / np.sqrt(len(spread))
        assert side.ci95 == pytest.approx(half, rel=1e-12)
    one = found.scenarios[0]
    assert one.before_runs == [run.id for run in runs[0] if run.scenario == one.scenario]
    assert len(one.after_runs) == 3


def test_without_shared_scenarios_nothing_is_paired_and_without_rewards_nothing_compared() -> None:
    apart = [runs_of(1, range(5), 1, 0.0), runs_of(2, range(5, 10), 1, 1.0)]
    found = compare(NAMES, apart, [[], []], None)
    assert found.comparison is not None
    assert (found.comparison.paired, found.scenarios, found.ties) == (False, [], 0)
    failed = [EvaluatedRun("r", "s-1", None, True)]
    found = compare(NAMES, [apart[0], failed], [[], []], None)
    assert found.comparison is None
    assert (found.after.mean, found.after.runs, found.after.failed) == (None, 0, 1)
