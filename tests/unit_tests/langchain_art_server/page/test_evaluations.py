"""Two versions compared: the same figures as by numpy, in 64 bits, from the same runs."""

import random
from collections import defaultdict

import numpy as np
import pytest

from langchain_art.statistics.intervals import sign_test, wilson
from langchain_art.wire import Review, Trajectory, Turn
from langchain_art_server.page.evaluations import (
    BETTER_THAN,
    Pair,
    blind_run,
    compare,
    pairs_of,
    preference,
)
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


def runs(version: str, **counts: int) -> list[EvaluatedRun]:
    return [
        EvaluatedRun(
            id=f"{scenario}-{version}-{number}", scenario=scenario, reward=1.0, failed=False
        )
        for scenario, count in counts.items()
        for number in range(count)
    ]


def chose(left: str, right: str, value: float | None, by: str = "ann", at: float = 1.0) -> Review:
    return Review(
        id=f"{left}-{right}-{by}-{at}",
        source="page",
        trajectory=left,
        kind="reward" if value is None else "score",
        name=f"{BETTER_THAN}{right}",
        value=value,
        reviewer=by,
        at=at,
    )


def test_the_side_is_drawn_for_each_pair_and_reviewer_and_stays() -> None:
    pairs = pairs_of(
        runs("old", **{f"s{i}": 1 for i in range(400)}),
        runs("new", **{f"s{i}": 1 for i in range(400)}),
    )
    lefts = {who: [one.sides(who)[0] == one.after for one in pairs] for who in ("ann", "bob")}
    for drawn in lefts.values():  # of 400 tosses of a coin within five standard deviations
        assert 150 < sum(drawn) < 250
    same = sum(a == b for a, b in zip(lefts["ann"], lefts["bob"], strict=True))
    assert 150 < same < 250
    assert lefts["ann"] == [one.sides("ann")[0] == one.after for one in pairs]


def test_choices_count_by_scenario_whichever_side_was_left() -> None:
    pairs = [Pair(name, f"{name}0", f"{name}1") for name in "abcde"] + [Pair("a", "a2", "a3")]
    said = [
        *(chose("a1", "a0", 1.0), chose("a2", "a3", 0.0)),  # both for the later one: one scenario
        *(chose("b0", "b1", 0.0, at=1), chose("b0", "b1", 1.0, at=2)),  # the last word holds
        *(chose("c1", "c0", 1.0), chose("c0", "c1", 1.0, "bob")),  # two who differ are a tie
        chose("d1", "d0", 0.5),
        chose("e0", "gone", 1.0),  # with a run that is none of these
        chose("e1", "other", 1.0).model_copy(update={"name": "tone"}),
    ]
    found = preference(pairs, said)
    assert (found.better, found.worse, found.ties) == (1, 1, 2)
    assert (found.preferences, found.reviewers) == (6, 2)
    assert (found.rate, found.low, found.high) == (0.5, *wilson(1, 2))
    assert found.p_value == sign_test(1, 1)
    swapped = preference([Pair(one.scenario, one.after, one.before) for one in pairs[:1]], said[:1])
    assert (swapped.better, swapped.worse) == (0, 1)
    nothing = preference(pairs, [])
    assert (nothing.rate, nothing.p_value, nothing.preferences) == (None, 1.0, 0)


def test_what_is_shown_has_no_version_reward_or_score() -> None:
    first = Turn(
        call_id="c0",
        node="search",
        model="agent@7",
        messages=({"role": "user", "content": "When?"},),
        reply={"role": "assistant", "content": "Let me see."},
        excluded_because="retried",
    )
    found = {"role": "tool", "content": "On 14 March."}
    second = Turn(
        call_id="c1", node="answer", model="agent@7", messages=(found,), extends=0, reward=0.25
    )
    run = Trajectory(
        id="t",
        turns=(first, second),
        reward=0.75,
        scores={"ruler": 0.5},
        metadata={"evaluation": "agent@7"},
    )
    shown = blind_run(run)
    text = shown.model_dump_json()
    assert not [one for one in ("agent@7", "0.25", "0.75", "ruler") if one in text]
    assert [call.node for call in shown.calls] == ["answer"]
    # A call that goes on from one that the graph discarded is shown with all that it read.
    last = [one["content"] for one in shown.calls[-1].messages]
    assert last == ["When?", "Let me see.", "On 14 March."]
