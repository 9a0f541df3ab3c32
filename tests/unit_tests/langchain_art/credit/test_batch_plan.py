import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.credit.batch_plan import call_weights, plan, stale, unscored
from langchain_art.credit.candidates import CallDecision, CandidateCall, CandidateRun
from langchain_art.wire import ClippedRatio, ConstantAggregation, OverlongPenalty, TrainConfig

MEAN = TrainConfig(advantage="mean")

ONE = CandidateCall(tokens=1)


def run(reward: float | None, *calls: CandidateCall, **fields) -> CandidateRun:
    return CandidateRun(calls or (ONE,), reward, **fields)


def test_every_reason_is_counted_once_in_its_own_unit() -> None:
    judge = CandidateCall(5, learns=False)
    groups = [
        [run(1, ONE, ONE, judge), run(0), run(None), run(None, failed=True)],
        [run(1, ONE, ONE), run(1)],  # flat
        [run(1), run(None)],  # single
        [run(None), run(None, failed=True)],  # empty
        [run(1, judge), run(0, judge)],  # nothing of the policy's
        [run(1, CandidateCall(1, lag=9)), run(0)],  # stale
        [
            run(1, CandidateCall(1, excluded_because="lost")),
            run(0, CandidateCall(2, excluded_because="grammar")),
        ],
        [],
    ]
    made = plan(groups, MEAN)
    assert made.excluded == {
        "runs.unscored": 3,
        "runs.failed": 2,
        "runs.without_trainable_calls": 4,
        "calls.frozen": 3,
        "calls.lost": 1,
        "calls.grammar": 1,
        "groups.zero_variance": 1,
        "groups.single": 1,
        "groups.empty": 3,
        "groups.stale": 1,
    }
    reasons = [[[v.excluded_because for v in calls] for calls in runs] for runs in made.decisions]
    assert reasons == [
        [[None, None, "calls.frozen"], [None], ["runs.unscored"], ["runs.failed"]],
        [["groups.zero_variance"] * 2, ["groups.zero_variance"]],
        [["groups.single"], ["runs.unscored"]],
        [["runs.unscored"], ["runs.failed"]],
        [["calls.frozen"], ["calls.frozen"]],
        [["groups.stale"], ["groups.stale"]],
        [["calls.lost"], ["calls.grammar"]],
        [],
    ]
    assert made.metrics["runs_trained"] == 2 and made.metrics["calls_trained"] == 3


def test_how_calls_were_sampled_is_said_of_runs_that_fared_alike() -> None:
    greedy = CandidateCall(2, excluded_because="greedy_decoding")
    lost = CandidateCall(2, excluded_because="lost")
    alike, apart = [run(1, greedy, lost), run(1, greedy)], [run(1, greedy), run(0, greedy)]
    made = plan([alike, apart], MEAN)
    assert made.excluded == {
        "groups.zero_variance": 1,
        "calls.greedy_decoding": 4,
        "runs.without_trainable_calls": 2,
    }
    stale = [run(1, CandidateCall(1, lag=9, excluded_because="grammar")), run(0)]
    assert plan([stale], MEAN).excluded == {"groups.stale": 1}


def test_what_is_cut_off_leaves_the_loss_and_stays_in_the_baseline() -> None:
    cut = CandidateCall(tokens=6, truncated=True)
    groups = [[run(1, CandidateCall(4)), run(0, CandidateCall(4), cut), run(0, truncated=True)]]
    without = plan(groups, TrainConfig(advantage="mean", mask_truncated=True))
    kept = plan(groups, MEAN)
    assert without.excluded == {"calls.truncated": 1, "runs.truncated": 1}
    assert kept.excluded == {}
    assert without.decisions[0][0] == [CallDecision(None, pytest.approx(2 / 3), 1 / 8)]
    assert kept.decisions[0][0] == [CallDecision(None, pytest.approx(2 / 3), 1 / 15)]
    assert without.decisions[0][1] == [
        CallDecision(None, pytest.approx(-1 / 3), 1 / 8),
        CallDecision("calls.truncated"),
    ]


def test_a_run_that_was_cut_off_is_one_however_many_calls_it_has() -> None:
    groups = [[run(1), run(0, ONE, ONE, CandidateCall(1, truncated=True), truncated=True)]]
    made = plan(groups, TrainConfig(advantage="mean", mask_truncated=True))
    assert made.excluded == {"runs.truncated": 1}
    assert [v.excluded_because for v in made.decisions[0][1]] == ["runs.truncated"] * 3


def test_a_node_without_anything_to_learn_is_left_out_of_the_loss() -> None:
    noise = CandidateCall(tokens=5, node="noise")
    groups = [[run(0, CandidateCall(1, "writer", reward=r), noise) for r in (1.0, 0.0)]]
    made = plan(groups, TrainConfig(advantage="mean", credit="node"))
    assert made.excluded == {"calls.zero_variance": 2}
    assert made.decisions[0][0] == [
        CallDecision(None, 0.5, 0.5),
        CallDecision("calls.zero_variance"),
    ]
    assert made.metrics["calls_trained"] == 2


def test_the_penalty_for_length_is_in_the_reward_before_groups_are_compared() -> None:
    config = TrainConfig(advantage="mean", overlong=OverlongPenalty(tokens=10, buffer=4))
    judge = CandidateCall(tokens=99, learns=False)
    runs = [run(1, CandidateCall(6), judge), run(1, CandidateCall(4), CandidateCall(4))]
    made = plan([runs], config)
    assert [calls[0].advantage for calls in made.decisions[0]] == [0.25, -0.25]
    assert made.metrics["reward_mean"] == 1  # what the user gave
    assert plan([runs], MEAN).excluded == {"groups.zero_variance": 1}


def test_staleness_is_counted_over_what_is_trained() -> None:
    runs = [
        run(1, CandidateCall(1, lag=2), CandidateCall(1, lag=5, excluded_because="lost")),
        run(0),
    ]
    made = plan([runs], MEAN)
    assert (made.metrics["staleness_mean"], made.metrics["staleness_max"]) == (1, 2)
    assert plan([runs], TrainConfig(advantage="mean", max_staleness=4)).excluded == {
        "groups.stale": 1
    }


def test_with_a_teacher_equal_groups_and_unscored_runs_are_trained() -> None:
    groups = [[run(1), run(0)], [run(5), run(5)], [run(None), run(3)]]
    beside = plan(groups, TrainConfig(advantage="mean", distillation={"teacher": "t@3"}))
    got = [[calls[0].advantage for calls in group] for group in beside.decisions]
    assert got == [[0.5, -0.5], [0.0, 0.0], [0.0, 0.0]]
    assert beside.excluded == {"runs.unscored": 1} and beside.metrics["calls_trained"] == 5
    alone = plan(groups, TrainConfig(distillation={"teacher": "t@3", "rewards": False}))
    got = [[calls[0].advantage for calls in group] for group in alone.decisions]
    assert got == [[0.0, 0.0]] * 3
    assert alone.excluded == Counter() and alone.metrics["calls_trained"] == 6


@given(st.integers(0, 2**32), st.sampled_from(["run", "turn"]))
def test_the_batchs_deviation_against_a_plain_computation(seed: int, credit: str) -> None:
    rng = random.Random(seed)
    groups = [
        [run(rng.gauss(0, 3), *[ONE] * rng.randint(1, 3)) for _ in range(rng.randint(1, 4))]
        for _ in range(4)
    ]
    plain = plan(groups, TrainConfig(advantage="mean", credit=credit))
    rows = [[one.advantage for one in calls] for group in plain.decisions for calls in group]
    trained = [i for i, n in enumerate(map(len, groups)) for _ in range(n) if n > 1]
    squares = [sum(a * a for a in row) / len(row) for row in rows]
    std = math.sqrt(math.fsum(squares) / max(1, len(trained) - 1))
    made = plan(groups, TrainConfig(credit=credit, advantage="batch_standardized"))
    got = [[one.advantage for one in calls] for group in made.decisions for calls in group]
    for one, row in zip(got, rows, strict=True):
        assert one == pytest.approx([a / (std + 1e-4) for a in row], rel=1e-9, abs=1e-12)


@given(st.integers(0, 2**32), st.sampled_from(["token", "sequence", "run"]))
def test_weights_sum_to_one_advantages_to_nothing_and_dropped_adds_up(seed: int, kind: str) -> None:
    rng = random.Random(seed)

    def some_run() -> CandidateRun:
        calls = [
            CandidateCall(
                tokens=rng.randrange(0, 5),
                learns=rng.random() < 0.8,
                excluded_because=rng.choice([None, None, "lost"]),
                lag=rng.randrange(0, 3),
                truncated=rng.random() < 0.2,
            )
            for _ in range(rng.randrange(0, 4))
        ]
        return CandidateRun(
            tuple(calls), rng.choice([None, 0.0, 1.0, rng.random()]), failed=rng.random() < 0.2
        )

    groups = [[some_run() for _ in range(rng.randrange(0, 6))] for _ in range(4)]
    config = TrainConfig(
        advantage="mean",
        loss=ClippedRatio(aggregation=kind),
        max_staleness=rng.choice([1, None]),
        mask_truncated=rng.random() < 0.5,
    )
    made = plan(groups, config)
    total = trained = 0.0
    for runs, of_runs in zip(groups, made.decisions, strict=True):
        advantages = {}
        for i, (one, decisions) in enumerate(zip(runs, of_runs, strict=True)):
            for call, decision in zip(one.calls, decisions, strict=True):
                total += decision.weight * call.tokens
                trained += decision.excluded_because is None
                assert (decision.excluded_because is None) == (decision.weight > 0)
                if decision.excluded_because is None:
                    assert call.tokens and call.learns and call.excluded_because is None
                    advantages[i] = decision.advantage
        counted = [one for one in runs if one.reward is not None and one.learns]
        mean = sum(one.reward or 0.0 for one in counted) / len(counted) if counted else 0.0
        for i, advantage in advantages.items():
            assert advantage == pytest.approx((runs[i].reward or 0.0) - mean, abs=1e-12)
    assert total == pytest.approx(1.0 if trained else 0.0)
    assert made.metrics["calls_trained"] == trained
    assert sum(n for why, n in made.excluded.items() if why.startswith("groups.")) <= len(groups)
    words = {
        v.excluded_because
        for runs in made.decisions
        for calls in runs
        for v in calls
        if v.excluded_because
    }
    assert words <= set(made.excluded)


def test_what_has_no_score_is_told_from_what_failed() -> None:
    for candidate, scores, expected in (
        (run(-1.0, failed=True), (), None),  # its user scored it all the same
        (run(None, CandidateCall(1, reward=0.0)), (), None),
        (run(1.0), ("a",), "runs.unscored"),
        (run(None, scores={"a": 1.0}), ("a", "b"), "runs.unscored"),
        (run(None, scores={"a": 1.0, "b": 0.0}), ("a", "b"), None),
        (run(None, failed=True), ("a",), "runs.failed"),
    ):
        assert unscored(candidate, scores) == expected


def test_stale_groups_go_as_one_and_only_for_what_learns() -> None:
    old, gone = run(1, CandidateCall(1, lag=3)), CandidateCall(1, lag=None)
    assert stale([run(1), old], 2) == "groups.stale"
    assert stale([run(1), old], 3) is None
    assert stale([run(1), old], None) is None
    assert stale([run(1), run(1, gone)], None) == "groups.rolled_back"
    for lag in (9, None):
        assert stale([run(1, CandidateCall(1, lag=lag, learns=False))], 0) is None


def test_a_constant_is_the_weight_of_each_token() -> None:
    assert call_weights([("a", 1), ("a", 3)], ConstantAggregation(value=50)) == [1 / 50, 1 / 50]
    assert call_weights([], "token") == []


@given(st.integers(0, 2**32), st.sampled_from(["token", "sequence", "run"]))
def test_the_weighed_sum_is_the_mean_of_means(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    calls = [(rng.randrange(3), rng.randrange(1, 6)) for _ in range(rng.randrange(1, 8))]
    losses = [[rng.gauss(0, 1) for _ in range(tokens)] for _, tokens in calls]
    units = {
        "token": [[loss] for losses_T in losses for loss in losses_T],
        "sequence": losses,
        "run": [
            [
                loss
                for (run, _), losses_T in zip(calls, losses, strict=True)
                if run == one
                for loss in losses_T
            ]
            for one in {run for run, _ in calls}
        ],
    }[kind]
    expected = math.fsum(math.fsum(unit) / len(unit) for unit in units) / len(units)
    weights = call_weights(calls, kind)
    got = math.fsum(weight * math.fsum(row) for weight, row in zip(weights, losses, strict=True))
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)
