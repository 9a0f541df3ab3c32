"""RulerEvaluator as its users meet it: through chat models, in every way a Runnable is used."""

import asyncio
import multiprocessing
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI

from langchain_art import ChatART, RulerEvaluator, capture, ruler_score_group
from langchain_art.errors import ConfigError, JudgeError
from langchain_art.evaluators import GroupEvaluator, Score
from langchain_art.evaluators.ruler import prompt
from langchain_art.evaluators.ruler.evaluator import VerdictCache
from langchain_art.evaluators.ruler.prompt import Names
from langchain_art.wire import TrajectoryGroup
from tests.conformance.suite.scripts import script
from tests.support.json_server import Refusal
from tests.support.judges.groups import Says, group, run, says
from tests.support.judges.judge_server import JudgeServer
from tests.support.judges.literal_judge import (
    ScriptedJudge,
    asked_ids,
    literal,
    parse,
    verdict,
)
from tests.support.live_server import RuleServer

RUNS = group(
    run("a", says("GOOD")), run("b", says("BAD")), run("c", says("neither")), question="When?"
)
RIGHT = {"a": 0.9, "b": 0.1, "c": 0.1}
#: Copies of this process, which need not import anything.
FORK = multiprocessing.get_context("fork")


def rewards(judged: TrajectoryGroup) -> dict[str, float | None]:
    return {one.id: one.reward for one in judged.trajectories}


async def test_every_way_of_calling_gives_the_same() -> None:
    evaluator = RulerEvaluator(ScriptedJudge())
    ways = [
        *await evaluator.abatch([RUNS] * 2),
        # Synchronous calls within a running loop, and from threads beside it.
        *evaluator.batch([RUNS] * 2),
        *ThreadPoolExecutor(3).map(evaluator.invoke, [RUNS] * 3),
        await evaluator(RUNS),
        (evaluator | (lambda g: g)).invoke(RUNS),
    ]
    assert [rewards(one) for one in ways] == [RIGHT] * 9
    assert ways[0].trajectories[0].scores == {"ruler": 0.9}
    assert ways[0].trajectories[0].metadata["judged"]["ruler"].startswith("about ")
    assert ways[0].metadata == RUNS.metadata
    assert [score.value for score in await evaluator.ascore(RUNS) if score] == [*RIGHT.values()]
    assert [score.value for score in evaluator.score(RUNS) if score] == [*RIGHT.values()]


def test_the_second_pass_shows_the_runs_in_reverse_and_cancels_a_places_favour() -> None:
    def favours_the_first(request: str) -> str:
        ids = asked_ids(request)
        return verdict({run: 0.8 - 0.2 * place for place, run in enumerate(ids)})

    model = ScriptedJudge(answer=favours_the_first)
    assert list(rewards(RulerEvaluator(model).invoke(RUNS)).values()) == pytest.approx([0.6] * 3)
    first, second = (asked_ids(request) for request in model.requests)
    assert first == second[::-1]
    once = RulerEvaluator(ScriptedJudge(answer=favours_the_first), passes=1).invoke(RUNS)
    assert sorted(rewards(once).values(), key=float) == pytest.approx([0.4, 0.6, 0.8])


def test_four_passes_are_two_orders_which_are_the_seeds_and_not_the_groups() -> None:
    def order(shown: TrajectoryGroup, seed: int, passes: int = 1) -> list[list[str]]:
        model = ScriptedJudge()
        RulerEvaluator(model, passes=passes, seed=seed).invoke(shown)
        asked = [parse(request).runs.values() for request in model.requests]
        return [[text.strip() for text in texts] for texts in asked]

    many = group(*(run(f"r{n}", says(f"answer {n}")) for n in range(8)))
    turned = many.model_copy(update={"trajectories": many.trajectories[::-1]})
    assert order(many, 1) == order(many, 1) == order(turned, 1) != order(many, 2)
    asked = order(many, 1, passes=4)
    assert (len(asked), len(set(map(tuple, asked)))) == (4, 4)
    assert all(one[::-1] in asked for one in asked)


def test_a_reply_that_cannot_be_used_is_asked_for_again_with_what_was_wrong() -> None:
    replies = iter(["no JSON", verdict({})])
    model = ScriptedJudge(answer=lambda request: next(replies, None) or literal(request))
    evaluator = RulerEvaluator(model, passes=1)
    assert rewards(evaluator.invoke(RUNS)) == RIGHT
    assert [len(prompt) for prompt in model.said] == [2, 3, 3]
    assert "no complete JSON object" in model.said[1][2].text
    assert (evaluator.spent.calls, evaluator.spent.unusable, evaluator.spent.groups) == (3, 2, 1)


@pytest.mark.parametrize(
    ("answer", "advised"), [(lambda _: "no", True), (lambda _: ValueError("rate limit"), False)]
)
async def test_what_cannot_be_judged_raises_and_is_counted(
    answer: Any, advised: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr("langchain_art.evaluators.ruler.evaluator._PAUSE", 0.0)
    evaluator = RulerEvaluator(ScriptedJudge(answer=answer), passes=1, attempts=2)
    with pytest.raises(JudgeError, match="2 attempts") as caught:
        await evaluator.ainvoke(RUNS)
    assert ("a stronger judge" in str(caught.value)) is advised
    assert (evaluator.spent.unjudged, evaluator.spent.calls, evaluator.spent.groups) == (1, 2, 0)


async def test_one_failed_pass_of_two_is_no_verdict_and_nothing_is_cached(tmp_path: Path) -> None:
    calls = iter([True, False])
    model = ScriptedJudge(answer=lambda request: literal(request) if next(calls) else "no")
    with pytest.raises(JudgeError):
        await RulerEvaluator(model, attempts=1).ainvoke(RUNS)
    broken, _ = cached(tmp_path / "c", model=ScriptedJudge(answer=lambda _: "no"), attempts=1)
    with pytest.raises(JudgeError):
        broken.invoke(RUNS)
    evaluator, _ = cached(tmp_path / "c")
    assert rewards(evaluator.invoke(RUNS)) == RIGHT


def test_failed_runs_are_not_shown_and_stay_as_they_are() -> None:
    failed = run("f", says("GOOD"), status="failed", error="boom")
    model = ScriptedJudge()
    shown = RUNS.model_copy(update={"trajectories": (*RUNS.trajectories, failed)})
    judged = RulerEvaluator(model).invoke(shown)
    assert judged.trajectories[-1] == failed
    assert len(asked_ids(model.requests[0])) == 3
    only = group(failed)
    assert RulerEvaluator(model).invoke(only) == only
    assert RulerEvaluator(model).score(group()) == []
    assert len(model.said) == 2


@pytest.mark.parametrize(
    ("said", "scores", "asked"),
    [
        (["GOOD", "GOOD"], [0.5, 0.5], []),  # it is decided
        (["GOOD", "BAD", "GOOD"], [0.9, 0.1, 0.9], [2, 2]),  # the same is shown once
        (["GOOD"], [0.9], [1]),
    ],
)
def test_no_more_is_asked_than_has_to_be(
    said: list[str], scores: list[float], asked: list[int]
) -> None:
    evaluator = RulerEvaluator(model := ScriptedJudge())
    shown = group(*(run(f"r{n}", says(text)) for n, text in enumerate(said)))
    assert [*rewards(evaluator.invoke(shown)).values()] == scores
    assert [len(asked_ids(request)) for request in model.requests] == asked
    assert (evaluator.spent.decided, evaluator.spent.groups) == (int(not asked), 1)


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 0},
        {"passes": 3},
        {"budget": 0},
        {"output_tokens": 10},
        {"rubric": " "},
        {"key": "own"},
        {"key": "a/b"},
        {"litellm_params": {"api_base": "x"}},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RulerEvaluator(ScriptedJudge(), **options)


def test_a_judge_by_name_says_what_to_install_and_another_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "langchain_litellm", None)
    with pytest.raises(ConfigError, match=re.escape('pip install "langchain-art[ruler]"')):
        RulerEvaluator("openai/o3")
    for wrong in (3, ""):
        with pytest.raises(ConfigError, match="expected a chat model"):
            RulerEvaluator(wrong)  # type: ignore[arg-type]


async def test_the_one_liner_gives_the_group_or_none() -> None:
    judged = await ruler_score_group(RUNS, ScriptedJudge())
    assert judged is not None and rewards(judged) == RIGHT
    broken = ScriptedJudge(answer=lambda _: "no")
    assert await ruler_score_group(RUNS, broken, swallow_exceptions=True) is None
    with pytest.raises(JudgeError):
        await ruler_score_group(RUNS, broken)


def cached(path: Path, **options: Any) -> tuple[RulerEvaluator, ScriptedJudge]:
    model = options.pop("model", None) or ScriptedJudge()
    return RulerEvaluator(model, cache=path, **options), model


def test_a_question_is_asked_once_and_a_different_one_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "judge.sqlite"
    first, model = cached(path)
    judged = first.invoke(RUNS)
    again, silent = cached(path)
    assert again.invoke(RUNS) == judged
    turned = RUNS.model_copy(update={"trajectories": RUNS.trajectories[::-1]})
    assert rewards(again.invoke(turned)) == RIGHT  # the order within a group decides nothing
    assert (len(model.said), len(silent.said), again.spent.cached) == (2, 0, 4)
    assert again.spent.input_tokens == 0

    other = RUNS.model_copy(update={"trajectories": (*RUNS.trajectories, run("d", says("more")))})
    changes: list[tuple[dict[str, Any], TrajectoryGroup]] = [
        ({"rubric": "Be short."}, RUNS),
        ({"context": None}, RUNS),
        ({"model": type("Another", (ScriptedJudge,), {})()}, RUNS),
        ({}, other),
        ({}, RUNS.model_copy(update={"metadata": {"scenario": {"question": "Who?"}}})),
    ]
    for options, shown in changes:
        evaluator, asked = cached(path, **options)
        evaluator.invoke(shown)
        assert len(asked.said) == 2, options


def make_and_share(path: Path, together: Barrier) -> None:
    for n in range(20):
        together.wait(60)
        VerdictCache(path / str(n)).put("key", [], "judge")
    shown = [group(run("a", says("GOOD")), run("b", says(f"BAD {n}"))) for n in range(20)]
    evaluator, _ = cached(path / "shared")
    assert [g.trajectories[0].reward for g in evaluator.batch(shown)] == [0.9] * 20


def test_processes_and_threads_make_one_cache_at_once_and_share_it(tmp_path: Path) -> None:
    arguments = (tmp_path, FORK.Barrier(4))
    makers = [FORK.Process(target=make_and_share, args=arguments) for _ in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert [maker.exitcode for maker in makers] == [0] * 4
    assert all(VerdictCache(tmp_path / str(n)).get("key") == [] for n in range(20))


def test_a_file_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, and long enough to be looked at " * 40)
    with pytest.raises(ConfigError, match="expected an SQLite database"):
        cached(tmp_path / "text")


def test_a_model_on_our_server_judges(rule_server: RuleServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(prompt, "draw_names", lambda case: Names("mark", ("one", "two", "three")))
    reply = verdict({"two": 0.5, "three": 0.25, "one": 1.0})
    model = ChatART(model="tiny", base_url=rule_server.base_url, max_tokens=400)
    shown = group(run("a", says("A")), run("b", says("B")), run("c", says("C")), id="served")
    evaluator = RulerEvaluator(model, context=lambda _: script({"say": reply}))
    assert evaluator.judge.structured
    with capture() as told:
        judged = evaluator.invoke(shown)
    # The runs are known by their transcripts, so in the order of those: A, B, C.
    assert rewards(judged) == {"a": 1.0, "b": 0.5, "c": 0.25}
    assert evaluator.spent.input_tokens > 100
    assert evaluator.spent.output_tokens > 30
    # A judge's calls within a captured run bear its name, so that training can leave them out.
    assert {turn.path for turn in told.trajectory().turns} == {("ruler",)}


def hosted(server: JudgeServer) -> ChatOpenAI:
    options: dict[str, Any] = {"api_key": "wrong", "max_retries": 0}
    return ChatOpenAI(model="m", base_url=server.base_url, **options)


@pytest.mark.parametrize(("status", "asked"), [(401, 1), (404, 1), (500, 2)])
def test_a_judge_is_not_asked_again_where_the_answer_would_be_the_same(
    status: int, asked: int
) -> None:
    with JudgeServer([Refusal(status)] * 2) as server:
        evaluator = RulerEvaluator(hosted(server), attempts=2, passes=1)
        with pytest.raises(JudgeError, match=f"{asked} attempts.* {status}"):
            evaluator.invoke(RUNS)
        assert len(server.requests) == evaluator.spent.calls == asked


def test_one_judge_serves_one_event_loop_after_another() -> None:
    with JudgeServer() as server:
        evaluator = RulerEvaluator(hosted(server), attempts=1)
        for _ in range(3):
            assert rewards(asyncio.run(evaluator.ainvoke(RUNS))) == RIGHT
        assert rewards(evaluator.invoke(RUNS)) == RIGHT
    assert (evaluator.spent.input_tokens, evaluator.spent.unpriced) == (8000, 8)
    schema = server.seen[0]["response_format"]["json_schema"]["schema"]
    assert set(schema["properties"]) == {"scores"}


def test_a_judge_without_retries_of_its_own_waits_as_long_as_it_is_told() -> None:
    refusals = [Refusal(429, Retry_After="1"), Refusal(503, retry_after_ms="500")]
    with JudgeServer(refusals) as server:
        evaluator = RulerEvaluator(hosted(server), passes=1)
        assert rewards(evaluator.invoke(RUNS)) == RIGHT
    first, second, third = server.times
    assert second - first >= 1.0
    assert third - second >= 0.5
    assert (evaluator.spent.calls, evaluator.spent.unusable) == (3, 2)


def test_parts_and_runs_without_a_score() -> None:
    class Constant(GroupEvaluator):
        async def ascore(self, group: TrajectoryGroup) -> list[Score | None]:
            return [Score(1.0, "all", {"half": 0.5}), None]

    two = group(run("a", says("x")), run("b", says("y"), reward=0.75))
    first, second = Constant("c").invoke(two).trajectories
    assert (first.reward, first.scores) == (1.0, {"c": 1.0, "c/half": 0.5})
    assert (second.reward, second.scores) == (None, {"own": 0.75})
    with pytest.raises(ConfigError, match="expected one each"):
        Constant("c").invoke(RUNS)
    for number in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="finite"):
            Score(number)
        with pytest.raises(ConfigError, match="finite"):
            Score(0.0, parts={"p": number})


def test_nobody_scored_is_not_judged() -> None:
    with pytest.raises(JudgeError, match="none of the 3 runs"):
        Says("never", None, None, None).invoke(RUNS)


def test_a_synchronous_call_from_an_evaluators_own_loop_is_refused() -> None:
    class Nested(GroupEvaluator):
        async def ascore(self, group: TrajectoryGroup) -> list[Score | None]:
            return list(Says("c", 1.0).score(group))

    with pytest.raises(ConfigError, match="await evaluator"):
        Nested("nested").invoke(RUNS)
