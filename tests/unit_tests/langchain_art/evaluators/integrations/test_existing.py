"""Evaluators of LangSmith, openevals and Langfuse give their rewards; their outputs are runs."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_openai_messages,
)
from langfuse import Evaluation
from langsmith import schemas
from langsmith.evaluation import EvaluationResult, RunEvaluator
from openevals.exact import exact_match

from langchain_art.errors import ConfigError
from langchain_art.evaluators import as_group, run_facts
from langchain_art.evaluators.integrations.convert import as_trajectory, candidates
from langchain_art.evaluators.integrations.existing import (
    from_langfuse,
    from_langsmith,
    scenarios_of,
)
from langchain_art.rollout.scenarios import MAX_SCENARIO, portable
from langchain_art.wire import Trajectory, TrajectoryGroup
from tests.support.judges.groups import group, run

RIGHT = "14 March"


def of(*outputs: Any, scenario: Any = None) -> TrajectoryGroup:
    given = {"id": "q-1", "input": "When?", "reference": RIGHT} if scenario is None else scenario
    runs = tuple(Trajectory(id=f"r-{n}", output=output) for n, output in enumerate(outputs))
    return TrajectoryGroup(id="g", trajectories=runs, metadata={"scenario": given})


def by_names(outputs: dict[str, Any], reference_outputs: dict[str, Any]) -> bool:
    return outputs["output"] == reference_outputs["output"]


def by_run(run: schemas.Run, example: schemas.Example) -> dict[str, Any]:
    assert run.outputs is not None and example.outputs is not None
    same = run.outputs["output"] == example.outputs["output"]
    return {"key": "same", "score": same, "comment": f"asked {example.inputs}"}


async def later(inputs: dict[str, Any], outputs: dict[str, Any]) -> float:
    assert inputs == {"input": "When?"}
    return len(outputs["output"]) / 100


class Later:
    async def __call__(self, outputs: Any, reference_outputs: Any) -> Any:
        return {"key": "same", "score": outputs["output"] == reference_outputs["output"]}


class Whole(RunEvaluator):
    def evaluate_run(self, run: Any, example: Any = None, *_: Any) -> EvaluationResult:
        return EvaluationResult(key="whole", score=run.outputs == example.outputs)


@pytest.mark.parametrize("evaluator", [by_names, by_run, Whole(), exact_match, Later()])
def test_each_shape_of_langsmith_gives_its_score(evaluator: Any) -> None:
    scores = from_langsmith(evaluator).score(of(RIGHT, "15 May"))
    assert [score and score.value for score in scores] == [1.0, 0.0]


def test_a_scenario_that_was_left_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    evaluator = from_langsmith(lambda outputs: 1.0)
    evaluator.score(of("x"))
    assert not caplog.messages
    left = of("x").model_copy(update={"metadata": portable("x" * MAX_SCENARIO)})
    for _ in range(2):
        assert [score and score.value for score in evaluator.score(left)] == [1]
    [said] = caplog.messages
    assert "None as inputs and reference of group g" in said and "64,002 bytes" in said


async def test_the_comment_an_async_evaluator_and_the_parts_are_kept() -> None:
    (score,) = await from_langsmith(by_run).ascore(of(RIGHT))
    assert score is not None and score.explanation == "asked {'input': 'When?'}"
    (score,) = await from_langsmith(later).ascore(of("x" * 50))
    assert score is not None and score.value == 0.5

    def several(outputs: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"key": "right", "score": 1}, {"key": "brief", "score": 0.25}]

    (score,) = await from_langsmith(several, key="brief").ascore(of(RIGHT))
    assert score is not None and (score.value, score.parts) == (0.25, {"right": 1.0})
    for key, words in ((None, r"\['right', 'brief'\].*pass key="), ("short", "got key='short'")):
        with pytest.raises(ConfigError, match=words):
            from_langsmith(several, key=key).score(of(RIGHT))


def test_no_value_is_not_scored_and_a_text_is_refused() -> None:
    for nothing in ({"key": "k", "score": None}, {"results": []}):
        judge = from_langsmith(lambda outputs, nothing=nothing: nothing)
        assert judge.score(of(RIGHT)) == [None]
    with pytest.raises(ConfigError, match="got the value 'good' of 'k', expected a number"):
        from_langsmith(lambda outputs: {"key": "k", "value": "good"}).score(of(RIGHT))
    with pytest.raises(ConfigError, match="expected a function"):
        from_langfuse("correct")  # type: ignore[arg-type]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_evaluator_of_langfuse_gives_its_value(asynchronous: bool) -> None:
    def correct(*, input: Any, output: Any, expected_output: Any, **_: Any) -> Any:
        value = output == expected_output
        one = Evaluation(name="correct", value=value, comment=str(input))
        return None if output == "?" else one

    async def correct_later(**given: Any) -> list[Evaluation]:
        return list(filter(None, [correct(**given)]))

    evaluator = correct_later if asynchronous else correct
    judge = from_langfuse(evaluator, outputs=lambda run: run.output["answer"])
    scores = judge.score(of(*({"answer": one} for one in (RIGHT, "15 May", "?"))))
    told = [score and (score.value, score.explanation) for score in scores]
    assert told == [(1.0, "When?"), (0.0, "When?"), None]


def test_the_rest_of_a_scenario_is_the_reference() -> None:
    shown: list[Any] = []

    def look(*, input: Any, expected_output: Any, **_: Any) -> Evaluation:
        shown.append((input, expected_output))
        return Evaluation(name="look", value=1.0)

    for scenario in ({"input": "a", "answer": "b"}, {"input": "a"}, "a"):
        from_langfuse(look).score(of("x", scenario=scenario))
    assert shown == [("a", {"answer": "b"}), ("a", None), ("a", None)]


def test_examples_and_items_become_scenarios() -> None:
    id = UUID(int=7)
    example = schemas.Example(
        id=id, inputs={"question": "When?"}, outputs={"answer": RIGHT}, created_at=datetime.now(UTC)
    )
    item = SimpleNamespace(id="i-1", input="When?", expected_output=None)
    assert scenarios_of([example, item]) == [
        {"id": str(id), "input": {"question": "When?"}, "reference": {"answer": RIGHT}},
        {"id": "i-1", "input": "When?"},
    ]
    with pytest.raises(ConfigError, match="an example of a LangSmith dataset"):
        scenarios_of([{"input": "When?"}])


CALL = {"name": "search", "args": {"q": "audit"}, "id": "c1"}
MESSAGES = [
    SystemMessage("Find it."),
    HumanMessage("When?"),
    AIMessage("", tool_calls=[CALL], name="searcher"),
    ToolMessage("7: audit", tool_call_id="c1"),
    AIMessage("14 March"),
    ToolMessage("noted", tool_call_id="c2"),
]
AS_DICTS: Any = convert_to_openai_messages(MESSAGES)


@pytest.mark.parametrize("output", [MESSAGES, {"messages": tuple(AS_DICTS)}])
def test_messages_become_turns(output: Any) -> None:
    told = as_trajectory(output, "r")
    assert [turn.node for turn in told.turns] == ["searcher", None]
    assert told.turns[1].extends == 0
    assert [m["role"] for m in told.prompt(1)] == ["system", "user", "assistant", "tool"]
    assert run_facts.actions(told) == ["search"]
    assert run_facts.answer(told) == "noted"
    assert not any(turn.ours for turn in told.turns)


def test_anything_else_is_one_turn_that_says_it() -> None:
    for output, text in (
        ({"date": "14 March", "n": [1]}, '{"date": "14 March", "n": [1]}'),
        ([], "[]"),
        ({"messages": []}, '{"messages": []}'),
        ({"messages": "none"}, '{"messages": "none"}'),
    ):
        (turn,) = as_trajectory(output, "r").turns
        assert turn.reply == {"role": "assistant", "content": text}
    assert run_facts.answer(as_trajectory([], "r")) == []


def test_single_messages_nothing_runs_and_groups() -> None:
    for message in (AIMessage("x"), {"role": "assistant", "content": "x"}):
        assert run_facts.answer(as_trajectory(message, "r")) == "x"
        both = as_group([message, message])  # what two experiments gave, say
        assert [run_facts.steps(told) for told in both.trajectories] == [1, 1]
    nothing = as_trajectory(None, "r")
    assert nothing.turns == () and run_facts.answer(nothing) is None
    (turn,) = as_trajectory([("user", "hello?")], "r").turns  # without an answer
    assert turn.reply is None and turn.messages == ({"role": "user", "content": "hello?"},)
    one = run("mine")
    assert as_group([one]).trajectories == (one,)
    whole = group(one, id="whole")
    assert as_group(whole) is candidates(whole) is whole


@pytest.mark.parametrize(
    ("outputs", "count"),
    [
        (MESSAGES, 1),
        (("user", "hi"), 2),
        ([("user", "hi")], 1),
        ([MESSAGES, MESSAGES], 2),
        ([{"messages": MESSAGES}, {"messages": AS_DICTS}], 2),
        ([{"date": 1}, {"date": 2}], 2),
        (AIMessage("x"), 1),
    ],
)
def test_a_list_is_a_group_unless_it_is_messages(outputs: Any, count: int) -> None:
    assert len(as_group(candidates(outputs)).trajectories) == count


def test_inputs_and_reference_are_the_scenario() -> None:
    asked = {"question": "When?"}
    shown = as_group(["a"], inputs=asked, reference={"answer": "b", "optimal_steps": 2})
    assert shown.metadata["scenario"] == {"input": asked, "answer": "b", "optimal_steps": 2}
    assert as_group(["a"], reference="b").metadata == {"scenario": {"answer": "b"}}
    assert as_group(["a"]).metadata == {}
    told = as_group(["a"], inputs=HumanMessage("q")).metadata["scenario"]
    assert told["input"] == {"role": "user", "content": "q"}


def test_nothing_and_nonsense_are_refused() -> None:
    with pytest.raises(ConfigError, match="no outputs"):
        as_group([])
    with pytest.raises(ConfigError, match="messages that LangChain cannot read"):
        as_trajectory([{"role": "nobody", "content": "x"}], "r")
    for one in ("14 March", {"messages": []}):
        with pytest.raises(ConfigError, match="expected a list with an output for each run"):
            as_group(one)
