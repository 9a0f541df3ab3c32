import math
import random
import statistics
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.credit.candidates import CandidateCall, CandidateRun, returns, steps
from langchain_art.credit.credit_assignment import ADVANTAGES, group_credit, score_credits
from langchain_art.credit.schemes import SCHEMES
from langchain_art.errors import InvalidRequest
from langchain_art.training.advantages import group_has_zero_variance
from langchain_art.wire import (
    AnchorCredit,
    Credit,
    SimpleAdvantage,
    Standardized,
    TrainConfig,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from langchain_art.wire.choices import CreditKind, kinds
from tests.support.live_server import REPO

MEAN = TrainConfig(advantage="mean")


def call(reward: float | None = None, node: str = "-", **more) -> CandidateCall:
    return CandidateCall(tokens=more.pop("tokens", 3), node=node, reward=reward, **more)


def run(reward: float | None, *calls: CandidateCall, **more) -> CandidateRun:
    return CandidateRun(calls or (call(),), reward, **more)


FROZEN = {"learns": False}


def test_rewards_of_calls_add_to_the_runs() -> None:
    runs = [run(1, call(1), call(0.5, **FROZEN)), run(None, call(0.5))]
    credit = group_credit(runs, MEAN)
    assert credit.advantages == {(0, 0): 1.0, (1, 0): -1.0}  # 2.5 and 0.5


@pytest.mark.parametrize("kind", ["run", "node", "call", "turn", "anchor"])
def test_a_group_of_one_and_equal_runs_give_nothing_and_say_so(kind: str) -> None:
    config = TrainConfig(advantage="mean", credit=kind)
    single = group_credit([run(1, call(prompt="s"), call(prompt="s"))], config)
    assert (single.advantages, single.whole) == ({}, "groups.single")
    flat = group_credit([run(1, call(prompt="s")), run(1 + 1e-9, call(prompt="s"))], config)
    assert (flat.advantages, flat.whole) == ({}, "groups.zero_variance")
    near = TrainConfig(advantage="mean", credit=kind, zero_variance_tolerance=0.1)
    assert group_credit([run(1), run(1.05)], near).whole == "groups.zero_variance"
    assert group_credit([run(1), run(1.05)], config).whole is None


@pytest.mark.parametrize("kind", ["run", "node", "call", "turn", "anchor"])
def test_frozen_and_discarded_calls_are_in_no_baseline_and_get_nothing(kind: str) -> None:
    config = TrainConfig(advantage="mean", credit=kind)
    plain = [run(1, call(prompt="s")), run(0, call(prompt="s")), run(0, call(prompt="s"))]
    judged = [
        run(
            r.reward,
            call(node="judge", prompt="s", **FROZEN),
            call(prompt="s", superseded=True),
            *r.calls,
            call(node="judge", prompt="s", **FROZEN),
        )
        for r in plain
    ]
    expected = group_credit(plain, config)
    got = group_credit(judged, config)
    assert got.advantages == {(i, 2): a for (i, _), a in expected.advantages.items()}
    assert got.reasons == {} and expected.advantages


def test_a_run_whose_steps_were_all_discarded_is_in_the_baseline_all_the_same() -> None:
    gone = run(0, call(superseded=True))
    credit = group_credit([run(1), run(1), gone, gone], MEAN)
    assert credit.advantages == {(0, 0): 0.5, (1, 0): 0.5}
    assert credit.whole is None
    assert group_credit([gone, run(1, call(superseded=True))], MEAN).whole is None


# --- by node ------------------------------------------------------------------------------------


def test_nodes_are_compared_with_themselves_runs_being_the_units() -> None:
    runs = [
        run(0, call(1.0, "writer"), call(0.0, "writer"), call(None, "noise")),
        run(0, call(0.0, "writer"), call(None, "noise"), call(None, "noise")),
        run(0, call(0.0, "writer"), call(0.5, "critic")),
    ]
    credit = group_credit(runs, TrainConfig(advantage="mean", credit="node"))
    third = 1 / 3
    assert credit.advantages == pytest.approx(
        {(0, 0): 2 * third, (0, 1): 2 * third, (1, 0): -third, (2, 0): -third}
    )
    # noise: equal rewards in the two runs that have it; critic: in one run alone.
    assert credit.reasons == {
        **{(0, 2): "calls.zero_variance", (1, 1): "calls.zero_variance"},
        **{(1, 2): "calls.zero_variance", (2, 1): "calls.single"},
    }


# --- by call ------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_credit_by_call_equals_the_means_written_out(seed: int) -> None:
    rng = random.Random(seed)
    value = lambda: rng.choice([None, 0.0, 0.5, 1.0])  # noqa: E731
    runs = [
        run(value(), *[call(value(), rng.choice("ab")) for _ in range(rng.randrange(1, 4))])
        for _ in range(rng.randrange(1, 5))
    ]
    whole = [one.reward for one in runs if one.reward is not None]
    found: dict[tuple[int, int], float] = {}
    for i, one in enumerate(runs):
        for k, step in enumerate(one.calls):
            of_node = [c.reward for r in runs for c in r.calls if c.node == step.node]
            known = [reward for reward in of_node if reward is not None]
            for reward, pool in ((one.reward, whole), (step.reward, known)):
                if reward is not None and len(set(pool)) > 1:
                    found[i, k] = found.get((i, k), 0.0) + reward - statistics.fmean(pool)
    credit = group_credit(runs, TrainConfig(advantage="mean", credit="call"))
    assert credit.advantages == pytest.approx(found, abs=1e-12)
    steps = {(i, k) for i, one in enumerate(runs) for k in range(len(one.calls))}
    assert bool(found) == (credit.whole is None)
    assert credit.whole or set(credit.advantages) | set(credit.reasons) == steps


# --- by turn ------------------------------------------------------------------------------------


def test_rewards_of_others_belong_to_the_step_before_them_or_to_the_first() -> None:
    aside = run(4, call(8, **FROZEN), call(1), call(16, **FROZEN), call(), call(32, **FROZEN))
    assert returns(aside, 0.5) == {1: 8 + 1 + 16 + 18, 3: 36}
    assert returns(run(1, call(1, **FROZEN)), 0.5) == {}


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_returns_equal_the_sum_written_out(seed: int, discount: float) -> None:
    rng = random.Random(seed)
    calls = [call(rng.choice([None, rng.uniform(-1, 1)])) for _ in range(rng.randrange(1, 6))]
    outcome = rng.choice([None, 1.0])
    rewards = [c.reward or 0.0 for c in calls]
    rewards[-1] += outcome or 0.0
    expected = {
        t: math.fsum(discount ** (k - t) * rewards[k] for k in range(t, len(calls)))
        for t in range(len(calls))
    }
    assert returns(run(outcome, *calls), discount) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 4)), min_size=2, max_size=6))
def test_without_rewards_of_calls_and_discount_turns_are_runs(
    shapes: list[tuple[float, int]],
) -> None:
    runs = [run(reward, *[call()] * length) for reward, length in shapes]
    by_run = group_credit(runs, MEAN)
    by_turn = group_credit(runs, TrainConfig(advantage="mean", credit="turn"))
    assert by_turn.advantages == pytest.approx(by_run.advantages, abs=1e-12)
    assert by_turn.whole == by_run.whole


# --- by state -----------------------------------------------------------------------------------


def test_the_gigpo_vector() -> None:
    # All begin in s. One goes to u and wins; one goes to u, comes back to s and loses; one loses.
    runs = [
        run(1, call(prompt="s"), call(prompt="u")),
        run(0, call(prompt="s"), call(prompt="u"), call(prompt="s")),
        run(0, call(prompt="s")),
    ]
    config = TrainConfig(advantage="mean", credit=AnchorCredit(discount=0.5, weight=2))
    win, lose = 2 / 3, -1 / 3
    # Returns in s: .5, 0, 0, 0; in u: 1, 0.
    expected = {
        **{(0, 0): win + 2 * 0.375, (0, 1): win + 2 * 0.5},
        **{(1, 0): lose - 2 * 0.125, (1, 1): lose - 2 * 0.5, (1, 2): lose - 2 * 0.125},
        (2, 0): lose - 2 * 0.125,
    }
    assert group_credit(runs, config).advantages == pytest.approx(expected)


def test_states_teach_where_runs_do_not() -> None:
    # Both win; the second takes a detour, and its first return is discounted more.
    runs = [run(1, call(prompt="s")), run(1, call(prompt="s"), call(prompt="t"))]
    credit = group_credit(runs, TrainConfig(advantage="mean", credit=AnchorCredit(discount=0.5)))
    assert credit.advantages == {(0, 0): 0.25, (1, 0): -0.25}
    assert credit.reasons == {(1, 1): "calls.zero_variance"}


# --- several rewards ----------------------------------------------------------------------------


def scored(**scores: float) -> CandidateRun:
    return CandidateRun((call(), call()), None, scores)


GDPO = TrainConfig(advantage=Standardized(scores={"right": 1.0, "short": 0.5}))


@given(st.integers(0, 2**32))
def test_gdpo_against_a_plain_computation(seed: int) -> None:
    rng = random.Random(seed)
    groups = [
        [scored(right=float(rng.random() < 0.5), short=rng.uniform(0, 100)) for _ in range(4)]
        for _ in range(3)
    ]
    flat = [scored(right=1.0, short=2.0)] * 4
    summed = []
    for group in groups:
        total = [0.0] * 4
        for name, weight in GDPO.scores.items():
            values = [one.scores[name] for one in group]
            if max(values) - min(values) > 1e-6:
                mean, std = statistics.fmean(values), statistics.stdev(values)
                total = [
                    t + weight * (v - mean) / (std + 1e-4)
                    for t, v in zip(total, values, strict=True)
                ]
        summed += total
    mean, std = statistics.fmean(summed), statistics.stdev(summed)
    expected = [(value - mean) / (std + 1e-4) for value in summed]
    *credits_, none = score_credits([*groups, flat], GDPO)
    got = [credit.advantages[i, 1] for credit in credits_ for i in range(4)]
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert (none.advantages, none.whole) == ({}, "groups.zero_variance")


def test_gdpo_counts_single_runs_and_refuses_rewards_of_calls() -> None:
    (single, _) = score_credits([[scored(right=1, short=1)], [scored(right=1, short=1)] * 2], GDPO)
    assert single.whole == "groups.single"
    mixed = CandidateRun((call(1.0),), None, {"right": 1, "short": 1})
    with pytest.raises(InvalidRequest, match="scores"):
        score_credits([[mixed, mixed]], GDPO)


# --- a scheme is one module that the config names: client, server and docs follow it ------------


def test_the_kinds_of_the_settings_are_those_of_the_type_and_of_the_docs() -> None:
    assert kinds(get_args(Credit)[0]) == get_args(CreditKind) == tuple(SCHEMES)
    rows = (REPO / "docs/credit.md").read_text().partition("## Which credit")[2]
    table, _, formulas = rows.partition("## Which advantage")[0].partition("With `r_i`")
    for kind in SCHEMES:
        assert f"| `{kind}`" in table
        assert f"- **`{kind}`**:" in formulas
    offered = [SimpleAdvantage, Standardized]
    advantages = {kind for one in offered for kind in get_args(one.model_fields["kind"].annotation)}
    assert ADVANTAGES.keys() == advantages - {"batch_standardized"}  # which needs other groups too


def test_the_client_asks_the_scheme_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of equal rewards teach something where a scheme compares them by something else."""
    two = TrajectoryGroup(
        id="g",
        trajectories=tuple(
            Trajectory(id=f"r{n}", reward=1.0, turns=(Turn(call_id=f"c{n}"),) * (n + 1))
            for n in range(2)
        ),
    )
    assert group_has_zero_variance(two, "p", TrainConfig(), {})
    by_length = lambda runs, credit, compared: [  # noqa: E731
        ({i: [(float(len(one.calls)), steps(runs, i))] for i, one in enumerate(runs)}, 1.0)
    ]
    monkeypatch.setitem(SCHEMES, "run", by_length)
    assert not group_has_zero_variance(two, "p", TrainConfig(), {})
    found = group_credit([run(1, call()), run(1, call(), call())], TrainConfig(advantage="mean"))
    assert found.advantages == {(0, 0): -0.5, (1, 0): 0.5, (1, 1): 0.5}
