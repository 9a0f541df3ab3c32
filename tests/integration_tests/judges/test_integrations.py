"""Each face in the real library that it is for: openevals, LangSmith, Langfuse, pytest."""

import asyncio
import inspect
import uuid
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import langsmith
import pytest
from langchain_core.messages import AIMessage
from langfuse import Langfuse
from langfuse.experiment import ExperimentItemResult
from langsmith import schemas
from langsmith.evaluation import evaluate, evaluate_comparative
from openevals.llm import create_llm_as_judge
from openevals.simulators import run_multiturn_simulation, run_multiturn_simulation_async
from urllib3 import Retry

from langchain_art import RulerEvaluator
from langchain_art.errors import ConfigError
from langchain_art.evaluators import GroupEvaluator, Score, WeightedCriteriaEvaluator
from langchain_art.evaluators.integrations.langfuse import item_evaluator, run_evaluator
from langchain_art.evaluators.integrations.langsmith import comparative_evaluator, row_evaluator
from langchain_art.evaluators.integrations.openevals import (
    async_openevals_evaluator,
    create_async_ruler,
    create_ruler,
    openevals_evaluator,
)
from langchain_art.evaluators.run_facts import answer
from langchain_art.wire import TrajectoryGroup
from tests.support.judges.groups import Says, no_verdict
from tests.support.judges.hosted import EXAMPLE, Hosted, run_id
from tests.support.judges.literal_judge import ScriptedJudge, literal
from tests.support.judges.ranking_judge import RankingJudge

ACCURACY = WeightedCriteriaEvaluator(weights={"accuracy": 1.0})


class Nearest(GroupEvaluator):
    """Relative, and of contents: 1 for the right answer, to others 0.5 by length."""

    def __init__(self) -> None:
        super().__init__("nearest")
        self.groups: list[TrajectoryGroup] = []

    async def ascore(self, group: TrajectoryGroup) -> Sequence[Score | None]:
        self.groups.append(group)
        right = group.metadata["scenario"]["answer"]
        answers = [str(answer(run)) for run in group.trajectories]
        longest = max(len(text) for text in answers)
        return [
            None
            if text == "None"
            else Score(1.0 if text == right else 0.5 * len(text) / longest, f"said {text}")
            for text in answers
        ]


def test_openevals_a_group_gives_a_list_and_a_run_gives_one_result() -> None:
    judge = openevals_evaluator(Nearest())
    results = judge(
        inputs="When?",
        outputs=[[AIMessage("14 March")], {"messages": [AIMessage("in May")]}, "a long story"],
        reference_outputs="14 March",
    )
    expected = [(1.0, "said 14 March"), (0.25, "said in May"), (0.5, "said a long story")]
    assert results == [
        {"key": "nearest", "score": score, "comment": comment, "metadata": None}
        for score, comment in expected
    ]
    single = openevals_evaluator(ACCURACY)(outputs="x", reference_outputs={"answer": "x"})
    assert single["metadata"] == {"parts": {"accuracy": 1.0}}  # type: ignore[call-overload]
    results = openevals_evaluator(Says("judge", None, 0.5))(outputs=["a", "b"])
    assert [result["score"] for result in results] == [None, 0.5]  # type: ignore[index]


async def test_openevals_simulations_take_our_evaluators() -> None:
    def app(message: Any, *, thread_id: str) -> dict[str, str]:
        return {"role": "assistant", "content": "14 March"}

    async def later(message: Any, *, thread_id: str) -> dict[str, str]:
        return app(message, thread_id=thread_id)

    asked: dict[str, Any] = {"user": ["When?"], "max_turns": 1, "reference_outputs": "14 March"}
    judges: Any = openevals_evaluator(ACCURACY), async_openevals_evaluator(ACCURACY)
    found = run_multiturn_simulation(app=app, trajectory_evaluators=[judges[0]], **asked)
    more = await run_multiturn_simulation_async(
        app=later, trajectory_evaluators=[judges[1]], **asked
    )
    results = [*found["evaluator_results"], *more["evaluator_results"]]
    assert [(one["key"], one["score"]) for one in results] == [("criteria", 1.0)] * 2


async def test_openevals_rulers_are_made_as_its_judges_are() -> None:
    asked = {"inputs": "When?", "outputs": ["14 May", "14 March"]}
    results = create_ruler(judge=RankingJudge(), feedback_key="quality", passes=1)(**asked)
    expected = [("quality", 0.4, "says 14 May"), ("quality", 1.0, "says 14 March")]
    assert [(r["key"], r["score"], r["comment"]) for r in results] == expected  # type: ignore[index]
    later = create_async_ruler(judge=RankingJudge(), feedback_key="quality")
    assert await later(**asked) == results
    with pytest.raises(ConfigError, match="expected one of them"):
        create_ruler()
    with pytest.raises(ConfigError, match="expected one of them"):
        create_async_ruler(judge=RankingJudge(), model="openai/o3")


def test_openevals_parameters_of_its_judges_are_ours() -> None:
    """Each of `create_llm_as_judge` that says what is asked and what comes back."""
    judge = ScriptedJudge(answer=literal)
    asked: Any = {"inputs": "When?", "outputs": ["GOOD", "BAD"]}

    def told(key: str = "score", **options: Any) -> list[Any]:
        made: Any = create_ruler(judge=judge, feedback_key="quality", passes=1, **options)
        return [result[key] for result in made(**asked)]

    assert told(continuous=True) == [0.9, 0.1]
    assert told(continuous=False) == [True, False]
    assert told(choices=[0.0, 0.5, 1.0]) == [1.0, 0.0]
    assert told("comment", use_reasoning=False) == [None, None]
    told(prompt="Compare {outputs} for {inputs}.", system="You know dates.")
    assert "You know dates.\n\nCompare (the runs) for (the task)." in judge.said[-1][0].text
    for wrong in ({"rubric": "x"}, {"choices": []}, {"choices": [1.0], "continuous": False}):
        with pytest.raises(ConfigError):
            told(**wrong)
    theirs = set(inspect.signature(create_llm_as_judge).parameters)
    ours = set(inspect.signature(create_ruler).parameters) - {"options"}
    # What RULER decides itself: its reply's schema, and how a judge is shown examples.
    missing = {"few_shot_examples", "output_schema", "structured_output_kwargs"}
    assert ours <= theirs and theirs - ours == missing


def test_openevals_an_evaluator_is_called_as_it_is() -> None:
    assert ACCURACY(outputs="x", reference_outputs={"answer": "x"})["score"] == 1.0
    many: Any = Nearest()(inputs="When?", outputs=["May", "14 March"], reference_outputs="14 March")
    assert [result["score"] for result in many] == [0.1875, 1.0]
    with pytest.raises(ConfigError, match="'nearest' with \\['x'\\]"):
        Nearest()(x=1)


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> list[schemas.Example]:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    told: Any = {"inputs": {"question": "When?"}, "outputs": {"answer": "14 March"}}
    return [schemas.Example(id=uuid.uuid4(), dataset_id=uuid.uuid4(), **told)]


def rows(target: Any, examples: list[schemas.Example], evaluator: Any) -> list[tuple[Any, ...]]:
    # Nothing listens there, and nothing is asked twice.
    options: dict[str, Any] = {"auto_batch_tracing": False, "retry_config": Retry(0)}
    client = langsmith.Client(api_url="http://127.0.0.1:9", api_key="none", **options)
    results = evaluate(
        target, examples, evaluators=[evaluator], upload_results=False, client=client
    )
    found = [one for row in results for one in row["evaluation_results"]["results"]]
    return [(one.key, one.score, one.comment) for one in found]


def test_langsmith_rows(examples: list[schemas.Example]) -> None:
    for judge in (row_evaluator(ACCURACY), ACCURACY):  # it takes an evaluator as it is
        found = rows(lambda inputs: {"output": "14 March"}, examples, judge)
        assert found == [("criteria", 1.0, "accuracy 1.00"), ("criteria/accuracy", 1.0, None)]
    ruler = RulerEvaluator(RankingJudge())
    assert rows(lambda inputs: {"output": "15 March"}, examples, ruler)[0][:2] == ("ruler", 0.4)
    messages = {"messages": [{"role": "assistant", "content": "15 March"}]}
    assert rows(lambda inputs: messages, examples, row_evaluator(ACCURACY))[0][1] == 0.0
    broken = Says("judge", error=no_verdict())
    for judge in (row_evaluator(broken), broken):
        [(key, score, comment)] = rows(lambda inputs: {"output": "x"}, examples, judge)
        assert (key, score) == ("judge", None) and "the judge gave no verdict" in comment
    nearest = Nearest()
    answers = {"answers": ["14 March", "May"]}
    found = rows(lambda inputs: answers, examples, row_evaluator(nearest, candidates="answers"))
    assert found == [("nearest_1", 1.0, "said 14 March"), ("nearest_2", 0.1875, "said May")]
    assert nearest.groups[0].metadata["scenario"]["input"] == {"question": "When?"}


async def test_langsmiths_client_takes_an_evaluator_as_it_is(
    examples: list[schemas.Example],
) -> None:
    async def target(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"output": "14 March"}

    with Hosted() as hosted:
        client = langsmith.Client(api_url=hosted.url, api_key="none", auto_batch_tracing=False)
        judges = [ACCURACY, Says("judge", error=no_verdict())]
        results = await client.aevaluate(target, examples, evaluators=judges, upload_results=False)
        found = [row["evaluation_results"]["results"] async for row in results]
    scores = sorted((one.key, one.score) for one in found[0])
    assert scores == [("criteria", 1.0), ("criteria/accuracy", 1.0), ("judge", None)]


def compared(*outputs: list[dict[str, Any]], judge: Any) -> tuple[dict[str, Any], str, list[Any]]:
    """LangSmith's comparison of experiments with these outputs: scores, a comment, feedback."""
    experiments = {str(uuid.uuid4()): one for one in outputs}
    with Hosted(experiments) as hosted:
        results = evaluate_comparative(
            tuple(uuid.UUID(one) for one in experiments),  # type: ignore[arg-type]
            evaluators=[judge],
            client=langsmith.Client(api_url=hosted.url, api_key="none"),
            max_concurrency=0,
        )
        found = results[uuid.UUID(EXAMPLE)]["feedback.nearest"]
        scores = {str(id): score for id, score in found.scores.items()}
        return scores, str(found.comment), hosted.posted("/feedback")


def test_langsmith_compares_experiments() -> None:
    judge = Nearest()
    scores, _, feedback = compared(
        [{"output": "14 March"}, {"output": None}],
        [{"role": "assistant", "content": "14 Marches"}],
        judge=comparative_evaluator(judge),
    )
    # The longest has 0.5; the run without an output has no score.
    assert scores == {run_id(0): 1.0, run_id(10): 0.5}
    assert sorted((one["run_id"], one["score"], one["comment"]) for one in feedback) == [
        (run_id(0), 1.0, "said 14 March"),
        (run_id(10), 0.5, "said 14 Marches"),
    ]
    (group,) = judge.groups
    assert [run.id for run in group.trajectories] == [run_id(0), run_id(1), run_id(10)]
    assert group.metadata["scenario"] == {"input": "When is the audit?", "answer": "14 March"}


class Broken(Nearest):
    """Cannot judge groups that are asked for something."""

    def __init__(self, asked: str) -> None:
        super().__init__()
        self.asked = asked

    async def ascore(self, group: TrajectoryGroup) -> Sequence[Score | None]:
        if group.metadata["scenario"]["input"] == self.asked:
            raise no_verdict()
        return await super().ascore(group)


@pytest.mark.parametrize("made", [lambda judge: judge, comparative_evaluator])
def test_langsmith_a_group_that_failed_leaves_the_comparison(made: Any) -> None:
    outputs = [{"output": "x"}], [{"output": "14 March"}]
    scores, comment, _ = compared(*outputs, judge=made(Broken("When is the audit?")))
    assert not scores and "the judge gave no verdict" in comment
    scores, _, _ = compared(*outputs, judge=made(Broken("other")))
    assert scores == {run_id(0): 0.0625, run_id(10): 1.0}


def experiment(client: Langfuse, **evaluators: Any) -> Any:
    answers = iter(["14 March", "in May", "April"])
    asked = {"input": "When is the audit?", "expected_output": "14 March"}
    other = {"input": "When is the party?", "expected_output": "April"}
    options = {"task": lambda *, item, **_: next(answers), "max_concurrency": 1, **evaluators}
    return client.run_experiment(name="mails", data=[asked, asked, other], **options)


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    with Hosted() as server:
        yield server


@pytest.fixture
def langfuse(hosted: Hosted) -> Iterator[Langfuse]:
    client = Langfuse(public_key=f"pk-{uuid.uuid4()}", secret_key="sk", base_url=hosted.url)
    yield client
    client.shutdown()


def evaluated(results: Sequence[ExperimentItemResult]) -> list[dict[str, Any]]:
    return [{one.name: one.value for one in result.evaluations} for result in results]


def test_langfuse_runs_of_one_input_are_a_group(langfuse: Langfuse, hosted: Hosted) -> None:
    judge = Nearest()
    found = experiment(langfuse, run_evaluators=[run_evaluator(judge, langfuse)])
    assert [len(group.trajectories) for group in judge.groups] == [2, 1]
    assert evaluated(found.item_results) == [{"nearest": 1.0}, {"nearest": 0.375}, {"nearest": 1.0}]
    summary = {one.name: one.value for one in found.run_evaluations}
    mean, spread = pytest.approx(2.375 / 3), pytest.approx(0.625 / 2)
    assert summary == {"nearest_mean": mean, "nearest_spread": spread}
    langfuse.flush()
    sent = [one for batch in hosted.posted("/api/public/scores") for one in batch]
    by_trace = {one["traceId"]: one["value"] for one in sent if one["name"] == "nearest"}
    assert [by_trace[one.trace_id] for one in found.item_results] == [1.0, 0.375, 1.0]


@pytest.mark.parametrize("made", [lambda judge: judge, item_evaluator])
def test_langfuse_items(langfuse: Langfuse, made: Any) -> None:
    found = experiment(langfuse, evaluators=[made(ACCURACY)], run_evaluators=[Nearest()])
    scores = evaluated(found.item_results)
    assert [one["criteria"] for one in scores] == [1.0, 0.0, 1.0]
    assert [one["criteria/accuracy"] for one in scores] == [1.0, 0.0, 1.0]
    assert [one["nearest"] for one in scores] == [1.0, 0.375, 1.0]
    assert [one.name for one in found.run_evaluations] == ["nearest_mean", "nearest_spread"]


@pytest.mark.parametrize("made", [lambda judge: judge, run_evaluator])
def test_langfuse_a_group_that_failed_leaves_the_others_their_scores(
    langfuse: Langfuse, made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = experiment(langfuse, run_evaluators=[made(Broken("When is the audit?"))])
    assert evaluated(found.item_results) == [{}, {}, {"nearest": 1.0}]
    assert [one.value for one in found.run_evaluations] == [1.0, 0.0]
    assert "1 of 2 groups" in str(found.run_evaluations[0].comment)
    assert "nearest could not judge a group: JudgeError: the judge gave no verdict" in caplog.text


async def test_langfuse_groups_are_judged_together() -> None:
    together = asyncio.Barrier(3)

    class Waiting(GroupEvaluator):
        async def ascore(self, group: TrajectoryGroup) -> Sequence[Score | None]:
            await asyncio.wait_for(together.wait(), 60)
            return [Score(1.0)]

    items = [SimpleNamespace(item={"input": n}, output="x", evaluations=[]) for n in range(3)]
    mean, _ = await run_evaluator(Waiting("waiting"))(item_results=items)
    assert (mean.value, mean.comment) == (1.0, "3 runs scored, 3 of 3 groups")
