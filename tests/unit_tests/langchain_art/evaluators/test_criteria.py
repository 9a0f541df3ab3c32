"""Weighted criteria by hand, and the facts of a run that they are computed from."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool as as_tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from langchain_art import capture
from langchain_art.errors import ConfigError
from langchain_art.evaluators import (
    GroupEvaluator,
    SumEvaluator,
    WeightedCriteriaEvaluator,
    completeness,
    dict_similarity,
    efficiency,
    exact,
    run_facts,
    satisfaction,
    string_similarity,
)
from langchain_art.evaluators.criteria import WEIGHTS
from langchain_art.rollout.scenarios import MAX_SCENARIO, portable
from langchain_art.training.advantages import group_has_zero_variance
from langchain_art.wire import TrainConfig, Trajectory, Turn
from tests.support.judges.groups import Says, calls, group, run, says, tool

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("formula", "first", "second", "expected"),
    [
        (efficiency, 3, 3, 1.0),
        (efficiency, 4, 3, 1 - 0.5 / 3),
        (efficiency, 30, 3, 0.0),
        (efficiency, 0, 1, 1.0),
        (satisfaction, 0, 30, 1.0),
        (satisfaction, 3, 60, 0.6),
        (satisfaction, 11, 0, 0.0),
        (completeness, ["search", "search", "read"], ["search", "read", "answer"], 2 / 3),
        (completeness, ["search"], ["search", "search"], 1.0),
        (completeness, [], [], 1.0),
        (exact, " 14 March\n", "14 March", 1.0),
        (exact, "14 march", "14 March", 0.0),
        (exact, {"a": 1}, {"a": 1}, 1.0),
        (string_similarity, "abcd", "bcde", 0.75),  # bcd: 3 of 4 in both
        (string_similarity, "ab" * 150, "b" + "ab" * 150, 600 / 601),  # no letter is "junk"
        (string_similarity, None, "x", 0.0),
        (dict_similarity, {"a": 1, "b": 2}, {"a": 1, "c": 3}, 1 / 3),
        (dict_similarity, '{"a": 1}', {"a": 1}, 1.0),
        (dict_similarity, "no JSON", {"a": 1}, 0.0),
        (dict_similarity, {"a": "abcd"}, {"a": "bcde"}, 0.75),
        (dict_similarity, {"a": [1, 2]}, {"a": [1, 2, 3, 4]}, 0.5),
        (dict_similarity, {"a": True}, {"a": 1}, 0.0),
        (dict_similarity, [1], {"a": 1}, 0.0),
    ],
)
def test_the_formulas_by_hand(formula: Any, first: Any, second: Any, expected: float) -> None:
    assert formula(first, second) == pytest.approx(expected, abs=1e-15)


def example_run() -> Trajectory:
    """Four calls; one tool of three missing; one error; 100 seconds."""
    turns = (
        Turn(reply=calls("search"), started_at=10.0, latency=1.0),
        Turn(
            extends=0, messages=[tool("Error: no")], reply=calls("x"), started_at=20.0, latency=1.0
        ),
        Turn(extends=1, messages=[tool("mail 7")], reply=calls("read"), started_at=30.0),
        Turn(extends=2, reply=says("14 March"), started_at=100.0, latency=10.0),
    )
    return Trajectory(id="a", turns=turns, output={"messages": [says("14 March")]})


def test_the_score_is_the_weighted_sum_and_every_criterion_is_reported() -> None:
    criteria = WeightedCriteriaEvaluator(
        optimal_steps=2, required_actions=["search", "read", "answer"], seconds=run_facts.seconds
    )
    (judged,) = criteria.invoke(group(example_run(), answer="14 March")).trajectories
    expected = {
        "accuracy": 1.0,
        "efficiency": 1 - 0.5 * (4 - 2) / 2,
        "completeness": 2 / 3,
        "user_satisfaction": 1 - 0.1 * 1 - 0.2 * (100 - 30) / 60,
    }
    parts = {f"criteria/{name}": value for name, value in expected.items()}
    by_hand = 0.4 * 1 + 0.3 * 0.5 + 0.2 * 2 / 3 + 0.1 * (0.9 - 0.2 * 70 / 60)
    assert judged.reward == pytest.approx(by_hand, abs=1e-12)
    assert judged.scores == pytest.approx(parts | {"criteria": by_hand}, abs=1e-12)


async def test_a_scenario_says_what_the_evaluator_does_not() -> None:
    shown = group(
        run("a", calls("search"), says("x")),
        reference="X",
        optimal_steps=1,
        required_actions=["search", "read"],
    )
    criteria = WeightedCriteriaEvaluator(
        expected="reference", accuracy=lambda answer, right: 7.0 * (answer.upper() == right)
    )
    (score,) = await criteria.ascore(shown)
    assert score is not None
    expected = {"accuracy": 1.0, "efficiency": 0.5, "completeness": 0.5, "user_satisfaction": 1.0}
    assert score.parts == expected
    light = WeightedCriteriaEvaluator(weights={"user_satisfaction": 1.0, "accuracy": 0.0})
    (score,) = await light.ascore(group(run("a", says("x"))))  # and no answer is asked for
    assert score is not None and score.parts == {"user_satisfaction": 1.0}


@pytest.mark.parametrize("lacks", ["answer", "optimal_steps", "required_actions"])
async def test_what_the_scenario_lacks_is_said(lacks: str) -> None:
    scenario = {"answer": "x", "optimal_steps": 1, "required_actions": []}
    del scenario[lacks]
    shown = group(run("a", says("x")), **scenario)
    for weights in [WEIGHTS, None][: 1 + (lacks == "answer")]:  # an answer is always needed
        with pytest.raises(ConfigError, match=f" needs '{lacks}'"):
            await WeightedCriteriaEvaluator(weights=weights).ascore(shown)


@pytest.mark.parametrize(
    ("options", "scenario", "expected"),
    [
        ({}, {}, {"accuracy": 0.8, "user_satisfaction": 0.2}),
        (
            {"optimal_steps": 1},
            {},
            {"accuracy": 0.5, "efficiency": 0.375, "user_satisfaction": 0.125},
        ),
        ({"required_actions": []}, {"optimal_steps": 1}, WEIGHTS),
    ],
)
async def test_without_weights_only_what_is_known_is_weighed(
    options: dict[str, Any], scenario: dict[str, Any], expected: dict[str, float]
) -> None:
    """The default weights in their proportions, of the criteria that can be computed."""
    shown = group(run("a", says("x")), run("b", says("y"), says("z")), answer="x", **scenario)
    for score in await WeightedCriteriaEvaluator(**options).ascore(shown):
        assert score is not None and score.parts.keys() == expected.keys()
        naive = sum(expected[name] * part for name, part in score.parts.items())
        assert score.value == pytest.approx(naive)


@pytest.mark.parametrize("more", [np.int64(7), "x" * MAX_SCENARIO], ids=["numpy", "large"])
async def test_a_scenario_that_was_left_out_of_the_group_is_told_as_that(more: Any) -> None:
    about = portable({"answer": "x", "more": more})
    left_out = group(run("a", says("x"))).model_copy(update={"metadata": about})
    with pytest.raises(ConfigError, match=r"not there: .*NumPy number.*64 kB.*left out"):
        await WeightedCriteriaEvaluator().ascore(left_out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": {"accuracy": 0.5}}, "add up to 0.5, expected 1"),
        ({"weights": {"accuracy": 1.5, "efficiency": -0.5}}, "-0.5 for 'efficiency'"),
        ({"weights": {"accuracy": math.nan}}, "nan for 'accuracy'"),
        ({"weights": {"acuracy": 1.0}}, r"\['acuracy'\], expected some of \['accuracy'"),
        ({"accuracy": "exakt"}, "expected 'exact', 'string', 'dict' or a function"),
        ({"accuracy": lambda *_: math.nan}, "accuracy= gave nan for run 'a'"),
        ({"optimal_steps": 0}, "at least 1"),
        ({"required_actions": "search"}, "'search', expected a list of names"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WeightedCriteriaEvaluator(**options).score(group(run("a", says("x")), answer="x"))
    with pytest.raises(ConfigError, match="got required_actions='search', expected a list"):
        given = group(run("a", says("x")), answer="x", required_actions="search")
        WeightedCriteriaEvaluator().score(given)


@given(JSON, JSON)
def test_similarities_are_bounded_and_a_value_is_like_itself(left: Any, right: Any) -> None:
    for measure in (exact, string_similarity, dict_similarity):
        assert 0 <= measure(left, right) <= 1
        assert measure(left, left) == 1 or (left is None and measure is string_similarity)


@given(
    weights=st.lists(st.integers(0, 100), min_size=4, max_size=4).filter(any),
    steps=st.integers(0, 50),
    optimal=st.integers(1, 10),
    errors=st.floats(0, 1e6),
    seconds=st.floats(0, 1e9),
    accuracy=st.floats(-1e9, 1e9),
)
def test_every_score_and_criterion_is_within_bounds(
    weights: list[int], steps: int, optimal: int, errors: float, seconds: float, accuracy: float
) -> None:
    criteria = WeightedCriteriaEvaluator(
        weights={name: w / sum(weights) for name, w in zip(WEIGHTS, weights, strict=True)},
        accuracy=lambda answer, expected: accuracy,
        optimal_steps=optimal,
        required_actions=["a", "b"],
        errors=lambda run: errors,
        seconds=lambda run: seconds,
    )
    (score,) = criteria.score(group(run("r", *[calls("a")] * steps), answer="x"))
    assert score is not None
    assert 0 <= score.value <= 1
    assert all(0 <= part <= 1 for part in score.parts.values())
    used = {name for name, weight in zip(WEIGHTS, weights, strict=True) if weight}
    assert set(score.parts) == used


def rewards(evaluator: GroupEvaluator, *seconds: float) -> list[float | None]:
    runs = [
        Trajectory(id=f"r{n}", turns=(Turn(reply=says("x"), started_at=0.0, latency=one),))
        for n, one in enumerate(seconds)
    ]
    judged = evaluator.invoke(group(*runs, answer="x"))
    flat = group_has_zero_variance(judged, "p", TrainConfig(), {})
    assert flat is (len({one.reward for one in judged.trajectories}) == 1)
    return [one.reward for one in judged.trajectories]


def test_equal_runs_are_equal_unless_a_clock_is_asked_for_which_tells_seconds_apart() -> None:
    assert rewards(WeightedCriteriaEvaluator(), 40.0, 40.02, 90.0) == [1.0] * 3
    clock = WeightedCriteriaEvaluator(seconds=run_facts.seconds)
    # 7e-6: more than a step's tolerance of 1e-6
    assert len(set(rewards(clock, 40.0, 40.0105, 40.9))) == 1
    assert rewards(clock, 30.0, 60.0) == pytest.approx([1.0, 0.98])
    late = SumEvaluator([(clock, 3.0), (Says("flat", 0.0, 0.0), 1.0)])
    assert len(set(rewards(late, 40.0, 40.9))) == 1


class Rough(Says):
    resolution = 0.1


def test_scores_closer_than_an_evaluators_resolution_are_equal() -> None:
    assert rewards(Rough("rough", 0.5, 0.55, 0.6), 1, 1, 1) == pytest.approx([0.55] * 3)
    assert rewards(Rough("rough", 0.5, 0.55, 0.7), 1, 1, 1) == [0.5, 0.55, 0.7]
    assert rewards(Says("exact", 0.5, 0.55), 1, 1) == [0.5, 0.55]
    judged = Rough("rough", 0.5, None, 0.6).invoke(group(run("a"), run("b"), run("c")))
    assert [one.reward for one in judged.trajectories] == [0.55, None, 0.55]


def test_steps_and_actions_leave_out_what_the_graph_threw_away() -> None:
    kept = Turn(reply=calls("search", "read"))
    retried = Turn(reply=calls("delete"), excluded_because="retried", error="boom")
    told = Trajectory(id="a", turns=(retried, kept, Turn(reply=calls("read"))))
    assert run_facts.steps(told) == 2
    assert run_facts.actions(told) == ["search", "read", "read"]
    assert run_facts.errors(told) == 0


def test_errors_are_failed_calls_bad_arguments_and_refused_tools() -> None:
    turns = (
        Turn(reply=calls("search", arguments='{"q"')),
        Turn(reply=calls("search", arguments="[1]"), messages=(tool("fine: Error: is a word"),)),
        Turn(error="Timeout", messages=(tool("Error: search is not a valid tool"),)),
    )
    output = {"messages": [says("x"), tool("Error invoking tool 'answer' with kwargs …")]}
    assert run_facts.errors(Trajectory(id="a", turns=turns, output=output)) == 5
    assert run_facts.errors(Trajectory(id="a", turns=turns)) == 4


def test_an_error_that_several_calls_were_shown_counts_once() -> None:
    user, asked, refused = says("When?") | {"role": "user"}, calls("search"), tool("Error: no such")
    agent = Turn(messages=(user,), reply=asked)
    answered = Turn(messages=(refused,), reply=says("?"), extends=0)
    whole = (user, asked, refused, says("?"))
    others = [Turn(node=name, messages=whole, reply=says("!")) for name in ("critic", "writer")]
    told = Trajectory(id="a", turns=(agent, answered, *others), output={"messages": [refused]})
    assert run_facts.errors(told) == 1
    again = [one | {"tool_call_id": "2"} for one in (refused, refused)]
    ended = told.model_copy(update={"output": {"messages": again}})
    assert run_facts.errors(ended) == 2
    unnamed = {"role": "tool", "content": "Error: no such"}
    assert run_facts.errors(run("a", output={"messages": [unnamed, unnamed]})) == 2


@as_tool
def fragile(number: int) -> str:
    """Raises."""
    raise ValueError(f"no {number}")


@pytest.mark.parametrize("asked", [("missing", {}), ("fragile", {}), ("fragile", {"number": 1})])
async def test_langgraphs_tool_errors_are_known(asked: tuple[str, dict[str, int]]) -> None:
    called = AIMessage("", tool_calls=[{"name": asked[0], "args": asked[1], "id": "1"}])
    model = GenericFakeChatModel(messages=iter([called, AIMessage("sorry")]))
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([fragile], handle_tool_errors=True))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    async with capture() as scope:
        await graph.compile().ainvoke({"messages": [("user", "go")]})
    told = scope.trajectory()
    assert run_facts.errors(told) == 1
    assert run_facts.steps(told) == 2
    assert run_facts.actions(told) == [asked[0]]
    assert run_facts.answer(told) == "sorry"


def test_seconds_span_the_calls_or_are_the_known_latencies() -> None:
    first, last = Turn(started_at=5.0, latency=2.0), Turn(started_at=9.0, latency=1.5)
    assert run_facts.seconds(Trajectory(id="a", turns=(first, last))) == pytest.approx(5.5)
    assert run_facts.seconds(Trajectory(id="a", turns=(first, Turn(latency=1.0)))) == 3.0
    assert run_facts.seconds(Trajectory(id="a")) == 0.0


def test_the_answer_is_the_output_else_the_last_reply() -> None:
    blocks = {"role": "assistant", "content": [{"type": "text", "text": "a"}, "b"]}
    assert run_facts.answer(run("a", says("x"), output={"messages": [says("y")]})) == "y"
    assert run_facts.answer(run("a", says("x"), output={"date": "14"})) == {"date": "14"}
    assert run_facts.answer(run("a", says("x"), blocks)) == "a\nb"
    assert run_facts.answer(run("a", calls("search"))) == ""
    assert run_facts.answer(run("a")) is None
    assert run_facts.answer(run("a", output={"messages": []})) is None
    assert run_facts.answer(run("a", output={"messages": [says("")]})) == ""


def test_a_state_whose_messages_are_no_chat_messages_is_read() -> None:
    for messages, answer in (
        (["x", "hello"], "hello"),
        ([says("x"), 3], "3"),
        ({"to": "Ann"}, {"messages": {"to": "Ann"}}),
    ):
        told = run("a", says("y"), output={"messages": messages})
        assert run_facts.answer(told) == answer
        assert run_facts.errors(told) == 0
