from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.errors import ConfigError, JudgeError
from langchain_art.evaluators import (
    FallbackEvaluator,
    FunctionEvaluator,
    GateEvaluator,
    GroupEvaluator,
    SumEvaluator,
    VoteEvaluator,
    as_evaluator,
    own_rewards,
)
from langchain_art.wire import TrajectoryGroup
from tests.support.judges.groups import Says, group, no_verdict, run, says

TWO = group(run("a", says("x")), run("b", says("y"), says("z")))


def turns(group: TrajectoryGroup) -> list[float]:
    return [float(len(run.turns)) for run in group.trajectories]


async def aturns(group: TrajectoryGroup) -> TrajectoryGroup:
    scored = [run.model_copy(update={"reward": 7.0}) for run in group.trajectories]
    return group.model_copy(update={"trajectories": tuple(scored)})


def values(scores: Any) -> list[float | None]:
    return [None if score is None else score.value for score in scores]


async def test_functions_of_every_kind_are_evaluators() -> None:
    assert values(await as_evaluator(turns).ascore(TWO)) == [1.0, 2.0]
    assert values(await as_evaluator(aturns).ascore(TWO)) == [7.0, 7.0]
    assert values(await FunctionEvaluator(lambda g: [None, 1], "odd").ascore(TWO)) == [None, 1.0]
    assert as_evaluator(turns).key == "turns"
    says = Says("judge", 1.0, 2.0)
    assert as_evaluator(says) is says
    with pytest.raises(ConfigError, match="1 scores for 2 runs"):
        await FunctionEvaluator(lambda g: [1.0], "short").ascore(TWO)


async def test_a_sum_weighs_its_parts_and_keeps_what_each_said() -> None:
    ruler = Says("ruler", 0.5, 1.0)
    mixed = SumEvaluator([(ruler, 0.8), (turns, -0.1)], key="mix")
    judged = await mixed(TWO)
    first, second = judged.trajectories
    assert first.reward == pytest.approx(0.8 * 0.5 - 0.1 * 1)
    assert second.reward == pytest.approx(0.8 * 1.0 - 0.1 * 2)
    assert first.scores == {"mix": first.reward, "mix/ruler": 0.5, "mix/turns": 1.0}
    assert first.metadata["judged"]["mix"] == "ruler 0.50: ruler says so | turns 1.00"
    (outer, _) = await SumEvaluator([(mixed, 1.0)], key="outer").ascore(TWO)
    assert outer is not None and outer.parts.keys() == {"mix", "mix/ruler", "mix/turns"}


async def test_a_sum_never_leaves_out_a_summand() -> None:
    mixed = SumEvaluator([(Says("a", None, 1.0), 1.0), (Says("b", 1.0, 1.0), 1.0)])
    assert values(await mixed.ascore(TWO)) == [None, 2.0]
    failing = SumEvaluator([(Says("a", error=no_verdict()), 1.0), (turns, 1.0)])
    with pytest.raises(JudgeError, match="no verdict"):
        await failing.ascore(TWO)


async def test_rewards_of_their_own_are_kept_and_can_be_added() -> None:
    judged = group(run("a", reward=0.25), run("b", reward=0.5))
    mixed = SumEvaluator([(Says("ruler", 1.0, 0.0), 0.5), (own_rewards, 0.5)])
    for _ in range(2):  # judged again: the same, not a sum of sums
        judged = await mixed(judged)
        assert [one.reward for one in judged.trajectories] == [0.625, 0.25]
        assert [one.scores["own"] for one in judged.trajectories] == [0.25, 0.5]


async def test_a_gate_shows_only_what_passes() -> None:
    three = group(run("a"), run("b"), run("c"))
    then = Says("ruler", 0.3, 0.9)
    gate = GateEvaluator(Says("tests", 1.0, 0.0, 1.0), then)
    scores = await gate.ascore(three)
    assert values(scores) == [0.3, 0.0, 0.9]
    assert then.shown == [["a", "c"]]
    assert scores[0] is not None and scores[0].parts == {"tests": 1.0, "ruler": 0.3}
    assert scores[1] is not None and scores[1].parts == {"tests": 0.0}
    assert scores[1].explanation == "tests is 0, below 0.5. tests says so"


async def test_a_gate_that_nothing_passes_asks_nobody() -> None:
    gate = GateEvaluator(Says("tests", 0.4, None), then := Says("ruler", error=no_verdict()))
    assert values(await gate.ascore(TWO)) == [0.0, None] and then.shown == []
    unscored = GateEvaluator(turns, Says("ruler", None, 0.5), at_least=1.0)  # which all pass
    assert values(await unscored.ascore(TWO)) == [None, 0.5]


async def test_a_fallback_takes_the_first_that_scores_the_whole_group() -> None:
    broken, half = Says("broken", error=no_verdict()), Says("half", None, 1.0)
    third, never = Says("third", 0.1, 0.2), Says("never", 9.0, 9.0)
    scores = await FallbackEvaluator([broken, half, third, never]).ascore(TWO)
    assert values(scores) == [0.1, 0.2]
    assert scores[0] is not None and scores[0].parts == {"third": 0.1}
    assert scores[0].explanation == "third: third says so"
    assert len(half.shown) == 1 and never.shown == []


async def test_a_fallback_never_mixes_and_never_guesses() -> None:
    half, other = Says("half", None, 1.0), Says("other", 0.5, None)
    assert values(await FallbackEvaluator([half, other]).ascore(TWO)) == [None, 1.0]
    for second in (0.0, None):  # zero is a score
        zero = FallbackEvaluator([Says("a", 0.0, second)])
        assert values(await zero.ascore(TWO)) == [0.0, second]
    broken = [Says(name, error=no_verdict()) for name in ("first", "second")]
    with pytest.raises(JudgeError, match=r"first: JudgeError: .*; second: JudgeError"):
        await FallbackEvaluator(broken).ascore(TWO)
    with pytest.raises(JudgeError, match="left every run without a score"):
        await FallbackEvaluator([Says("none", None, None)]).ascore(TWO)


@pytest.mark.parametrize(
    "made",
    [
        lambda wrong: FallbackEvaluator([wrong, turns]),
        lambda wrong: VoteEvaluator([wrong, turns, aturns]),
        lambda wrong: SumEvaluator([(wrong, 1.0), (turns, 1.0)]),
    ],
)
async def test_a_wrong_program_is_not_hidden(made: Callable[[Any], GroupEvaluator]) -> None:
    with pytest.raises(ConfigError, match="no key"):
        await made(Says("wrong", error=ConfigError("no key"))).ascore(TWO)
    with pytest.raises(ConfigError, match="3 scores for 2 runs"):
        await made(Says("wrong", 1.0, 1.0, 1.0)).ascore(TWO)


async def test_judges_vote_and_need_their_quorum() -> None:
    judges = [Says("a", 0.0, 0.2), Says("b", 0.4, 0.4), Says("c", 1.0, None)]
    voted = await VoteEvaluator(judges).ascore(TWO)
    assert values(voted) == [0.4, pytest.approx(0.3)]
    assert voted[0] is not None and voted[0].parts == {"a": 0.0, "b": 0.4, "c": 1.0}
    assert voted[1] is not None and voted[1].parts == {"a": 0.2, "b": 0.4}
    assert values(await VoteEvaluator(judges, quorum=3).ascore(TWO)) == [0.4, None]
    broken = Says("broken", error=no_verdict())
    assert values(await VoteEvaluator([broken, turns, aturns]).ascore(TWO)) == [4.0, 4.5]
    with pytest.raises(JudgeError, match=r"1 of 2 judges scored 'g', expected 2\. broken: Judge"):
        await VoteEvaluator([broken, turns]).ascore(TWO)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SumEvaluator([]), "at least one"),
        (lambda: SumEvaluator([(turns, 1.0), (turns, 1.0)]), r"\['turns', 'turns'\]"),
        (lambda: SumEvaluator([(turns, float("nan"))]), "nan"),
        (lambda: SumEvaluator([turns]), r"expected pairs \(evaluator, weight\)"),  # type: ignore[list-item]
        (lambda: SumEvaluator([("openai/o3", 1.0)]), "'openai/o3' as an evaluator, expected"),  # type: ignore[list-item]
        (lambda: GateEvaluator(turns, VoteEvaluator), "as an evaluator, expected"),  # type: ignore[arg-type]
        (lambda: VoteEvaluator([turns, aturns]).invoke(["a"]), r"got \['a'\], expected a Traj"),  # type: ignore[arg-type]
        (lambda: GateEvaluator(turns, aturns, at_least=float("inf")), "at_least=inf"),
        (lambda: VoteEvaluator([turns]), "at least two judges"),
        (lambda: VoteEvaluator([turns, aturns], quorum=3), "quorum=3"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=5))
def test_a_sum_equals_the_naive_one(parts: list[tuple[float, float]]) -> None:
    one = group(run("a"))
    made = [(Says(f"j{n}", value), weight) for n, (value, weight) in enumerate(parts)]
    (score,) = SumEvaluator(made).score(one)
    assert score is not None and score.value == pytest.approx(
        sum(v * w for v, w in parts), abs=1e-9
    )
