"""Evaluators of LangSmith, openevals and Langfuse give the rewards that they gave there."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from langfuse import Evaluation
from langsmith import schemas
from langsmith.evaluation import EvaluationResult, RunEvaluator
from openevals.exact import exact_match

from langchain_art.errors import ConfigError
from langchain_art.evaluators.integrations.existing import (
    from_langfuse,
    from_langsmith,
    scenarios_of,
)
from langchain_art.rollout.scenarios import MAX_SCENARIO, portable
from langchain_art.wire import Trajectory, TrajectoryGroup

RIGHT = "14 March"


def group(*outputs: Any, scenario: Any = None) -> TrajectoryGroup:
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
    async def __call__(
        self, outputs: dict[str, Any], reference_outputs: dict[str, Any]
    ) -> dict[str, Any]:
        return {"key": "same", "score": outputs["output"] == reference_outputs["output"]}


class Whole(RunEvaluator):
    def evaluate_run(self, run: Any, example: Any = None, *_: Any) -> EvaluationResult:
        return EvaluationResult(key="whole", score=run.outputs == example.outputs)


@pytest.mark.parametrize("evaluator", [by_names, by_run, Whole(), exact_match, Later()])
def test_each_shape_of_langsmith_gives_its_score(evaluator: Any) -> None:
    scores = from_langsmith(evaluator).score(group(RIGHT, "15 May"))
    assert [score and score.value for score in scores] == [1.0, 0.0]


def test_a_scenario_that_was_left_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    evaluator = from_langsmith(lambda outputs: 1.0)
    evaluator.score(group("x"))
    assert not caplog.messages
    left = group("x").model_copy(update={"metadata": portable("x" * MAX_SCENARIO)})
    for _ in range(2):
        assert [score and score.value for score in evaluator.score(left)] == [1]
    [said] = caplog.messages
    assert "None as inputs and reference of group g" in said and "64,002 bytes" in said


async def test_the_comment_an_async_evaluator_and_the_parts_are_kept() -> None:
    (score,) = await from_langsmith(by_run).ascore(group(RIGHT))
    assert score is not None and score.explanation == "asked {'input': 'When?'}"
    (score,) = await from_langsmith(later).ascore(group("x" * 50))
    assert score is not None and score.value == 0.5

    def several(outputs: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"key": "right", "score": 1}, {"key": "brief", "score": 0.25}]

    (score,) = await from_langsmith(several, key="brief").ascore(group(RIGHT))
    assert score is not None and (score.value, score.parts) == (0.25, {"right": 1.0})
    for key, words in ((None, r"\['right', 'brief'\].*pass key="), ("short", "got key='short'")):
        with pytest.raises(ConfigError, match=words):
            from_langsmith(several, key=key).score(group(RIGHT))


def test_no_value_is_not_scored_and_a_text_is_refused() -> None:
    for nothing in ({"key": "k", "score": None}, {"results": []}):
        judge = from_langsmith(lambda outputs, nothing=nothing: nothing)
        assert judge.score(group(RIGHT)) == [None]
    with pytest.raises(ConfigError, match="got the value 'good' of 'k', expected a number"):
        from_langsmith(lambda outputs: {"key": "k", "value": "good"}).score(group(RIGHT))
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
    scores = judge.score(group(*({"answer": one} for one in (RIGHT, "15 May", "?"))))
    told = [score and (score.value, score.explanation) for score in scores]
    assert told == [(1.0, "When?"), (0.0, "When?"), None]


def test_the_rest_of_a_scenario_is_the_reference() -> None:
    shown: list[Any] = []

    def look(*, input: Any, expected_output: Any, **_: Any) -> Evaluation:
        shown.append((input, expected_output))
        return Evaluation(name="look", value=1.0)

    for scenario in ({"input": "a", "answer": "b"}, {"input": "a"}, "a"):
        from_langfuse(look).score(group("x", scenario=scenario))
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
