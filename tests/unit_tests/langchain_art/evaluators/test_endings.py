"""StopIteration, SystemExit and KeyboardInterrupt end with an error, and never hang."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from threading import current_thread, main_thread
from typing import Any

import pytest

from langchain_art import RulerEvaluator, gather_sync
from langchain_art.errors import ArtError, JudgeError, RolloutFailed
from langchain_art.evaluators import GroupEvaluator, Score, SumEvaluator, as_evaluator, score_groups
from langchain_art.evaluators.integrations.existing import from_langfuse, from_langsmith
from langchain_art.wire import TrajectoryGroup
from tests.support.judges.groups import Says, group, run, says
from tests.support.judges.literal_judge import ScriptedJudge

pytestmark = pytest.mark.timeout(30)
RUNS = group(run("a", says("GOOD")), run("b", says("BAD")))
ENDINGS = pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt])
Kind = type[BaseException]


def works_still() -> bool:
    return Says("next", 1.0, 2.0).invoke(RUNS).trajectories[1].reward == 2.0


@ENDINGS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reward_and_a_rollout(kind: Kind, asynchronous: bool) -> None:
    def raises(given: Any) -> Any:
        raise kind("told")

    async def later(given: Any) -> Any:
        return raises(given)

    asked = later if asynchronous else raises
    judge = as_evaluator(asked)
    for ask in (judge.invoke, judge.score):
        with pytest.raises((ArtError, RuntimeError), match=kind.__name__):
            ask(RUNS)
    assert works_still()
    if asynchronous and kind is KeyboardInterrupt:  # on the main thread it is a Ctrl-C
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(score_groups([RUNS], later))
        with pytest.raises(KeyboardInterrupt):
            gather_sync(later, ["q"], group_size=2)
        return
    with pytest.raises(ArtError, match=rf"(?s)raised for all 1 groups.*{kind.__name__}"):
        asyncio.run(score_groups([RUNS], judge))
    with pytest.raises(RolloutFailed, match=kind.__name__):
        gather_sync(asked, ["q"], group_size=2)
    (found,) = gather_sync(asked, ["q"], group_size=2, max_failed=1.0).groups
    assert [one.status for one in found.trajectories] == ["failed"] * 2


def test_what_a_generator_raises_is_of_its_group() -> None:
    def rate(shown: TrajectoryGroup) -> Iterator[float]:
        for one in shown.trajectories:
            assert current_thread() is not main_thread()
            yield {"a": 1.0}[one.id]

    with pytest.raises(ArtError, match=r"<lambda> raised StopIteration.*next\(\) was called"):
        as_evaluator(lambda shown: next(iter([]))).invoke(RUNS)
    found = asyncio.run(score_groups([RUNS, group(run("a", says("GOOD")))], rate))
    assert [one.rewards for one in found.groups] == [[1.0]]
    assert (found.unjudged, found.first_error) == (1, "KeyError: 'b'")


def nested(raises: Callable[..., Any]) -> GroupEvaluator:
    """An evaluator whose tasks raise."""

    class Nested(GroupEvaluator):
        async def ascore(self, group: TrajectoryGroup) -> Sequence[Score | None]:
            async def one() -> Score:
                return raises()

            return await asyncio.gather(*(one() for _ in group.trajectories))

    return Nested("nested")


@ENDINGS
@pytest.mark.parametrize(
    "made",
    [
        lambda raises: SumEvaluator([(nested(raises), 1.0)]),
        lambda raises: RulerEvaluator(ScriptedJudge(answer=raises), attempts=2),
        lambda raises: from_langsmith(lambda inputs, outputs: raises()),
        lambda raises: from_langfuse(lambda **given: raises()),
    ],
)
def test_an_evaluator(kind: Kind, made: Callable[..., GroupEvaluator], monkeypatch: Any) -> None:
    def raises(*_: object) -> Any:
        raise kind

    monkeypatch.setattr("langchain_art.evaluators.ruler.evaluator._PAUSE", 0.0)
    judge = made(raises)
    with pytest.raises((ArtError, RuntimeError), match=kind.__name__):
        judge.invoke(RUNS)
    if isinstance(judge, RulerEvaluator):
        with pytest.raises(JudgeError, match=kind.__name__):
            asyncio.run(judge.ainvoke(RUNS))
        assert judge.spent.unusable == 8
    assert works_still()
