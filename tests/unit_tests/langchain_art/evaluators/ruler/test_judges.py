import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import ChatMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda

from langchain_art import ChatART, RulerEvaluator
from langchain_art.errors import ConfigError, JudgeError, Overloaded
from langchain_art.evaluators import VoteEvaluator
from langchain_art.evaluators.ruler import judge_model
from langchain_art.evaluators.ruler.judge_model import JudgeCalls, identity, retry_after
from langchain_art.evaluators.ruler.reply_parser import Verdict
from tests.support.judges.groups import group, run, says
from tests.support.judges.literal_judge import ScriptedJudge, literal
from tests.support.live_server import REPO

pytestmark = pytest.mark.timeout(60)
RUNS = group(run("a", says("GOOD")), run("b", says("BAD")), question="When?")
RIGHT = [0.9, 0.1]


class Moody(ScriptedJudge):
    """A judge with a setting that decides."""

    mood: str = "fair"

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mood", self.mood) != "fair":
            raise ValueError("not in the mood")
        return super()._generate(messages, *args, **kwargs)


def flaky() -> ScriptedJudge:
    """Raises at every first of two calls."""
    calls = iter(range(1000))
    return ScriptedJudge(
        answer=lambda request: ValueError("busy") if next(calls) % 2 == 0 else literal(request)
    )


def answered(made: Callable[[str], Any]) -> Runnable[Any, Any]:
    return RunnableLambda(lambda messages: made(literal(messages[1].text)))


MOOD = ConfigurableField(id="mood")
JUDGES: dict[str, Callable[[], Runnable[Any, Any]]] = {
    "with_retry": lambda: flaky().with_retry(wait_exponential_jitter=False),
    "with_fallbacks": lambda: Moody(mood="bad").with_fallbacks([ScriptedJudge()]),
    "bind": lambda: Moody(mood="bad").bind(mood="fair"),
    "configured": lambda: (
        Moody(mood="bad").configurable_fields(mood=MOOD).with_config(configurable={"mood": "fair"})
    ),
    "of two": lambda: ScriptedJudge().configurable_alternatives(
        ConfigurableField(id="which"), other=Moody(mood="bad")
    ),
    "a chain": lambda: (
        RunnableLambda(lambda messages: {"all": messages})
        | ChatPromptTemplate.from_messages([("placeholder", "{all}")])
        | ScriptedJudge()
        | StrOutputParser()
    ),
    "another message": lambda: answered(lambda text: ChatMessage(text, role="judge")),
    "JSON": lambda: answered(json.loads),
    "a schema": lambda: answered(Verdict.model_validate_json),
    "raw": lambda: answered(lambda text: {"raw": ChatMessage(text, role="x"), "parsed": None}),
}


@pytest.mark.parametrize("kind", JUDGES)
def test_any_runnable_that_answers_messages_judges(kind: str) -> None:
    ruler = RulerEvaluator(JUDGES[kind](), attempts=1)
    assert [one.reward for one in ruler.invoke(RUNS).trajectories] == RIGHT


def test_a_configurable_judge_is_configured_by_the_call(tmp_path: Path) -> None:
    judge = Moody().configurable_fields(mood=MOOD)
    ruler = RulerEvaluator(judge, attempts=1, cache=tmp_path / "verdicts")
    given: Any = {"configurable": {"mood": "bad"}}
    with pytest.raises(JudgeError, match="not in the mood"):
        ruler.invoke(RUNS, given)
    assert [one.reward for one in ruler.invoke(RUNS).trajectories] == RIGHT
    with pytest.raises(JudgeError, match="not in the mood"):  # and not from the cache
        asyncio.run(ruler.ainvoke(RUNS, given))


def test_a_runnable_that_answers_something_else_has_no_verdict() -> None:
    for answer in (None, {"raw": None}):
        with pytest.raises(JudgeError, match="1 attempts"):
            RulerEvaluator(answered(lambda text, answer=answer: answer), attempts=1).invoke(RUNS)


# ---- identity


PROGRAM = """
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda
from langchain_art import ChatART
from langchain_art.evaluators.ruler.judge_model import identity

limit = 3
def parse(message):
    known = message.type in {"ai", "human", "tool", "system", "a", "b", "c", "d"}
    return message.text[:limit] if known else ""

model = ChatART(model="m", base_url="http://localhost:1", callbacks=[BaseCallbackHandler()])
for judge in (model, model.with_retry(), model.bind(stop=["x"]), model | RunnableLambda(parse)):
    print(identity(judge))
"""
HANGS = """
import asyncio, time
from langchain_art import ChatART, RulerEvaluator
from tests.support.judges.groups import group, run, says

ruler = RulerEvaluator(RunnableLambda(lambda _: time.sleep(300)))
shown = group(run("a", says("x")), run("b", says("y")))
try:
    asyncio.run(asyncio.wait_for(ruler.ainvoke(shown), 0.2))
except TimeoutError:
    print("cancelled")
"""


def test_a_judge_is_the_same_in_another_process_which_one_that_hangs_does_not_keep_alive(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Memory addresses and the order of sets differ between processes; verdicts are found again."""
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM + HANGS],
        capture_output=True, text=True, check=True, cwd=REPO, timeout=50,
        env={"PYTHONPATH": str(REPO), "PYTHONHASHSEED": "1"},
    ).stdout.split()  # fmt: skip
    exec(PROGRAM, {"__name__": "__main__"})
    assert [*capsys.readouterr().out.split(), "cancelled"] == other
    assert len(set(other)) == 5


def test_what_decides_replies_is_of_the_identity_and_what_watches_is_not() -> None:
    def of(**fields: Any) -> str:
        return identity(ChatART(**{"model": "m", "base_url": "http://localhost:1"} | fields))

    assert of() == of(callbacks=[BaseCallbackHandler()], tags=["x"], metadata={"y": object()})
    different = {of(), of(model="n"), of(temperature=0.5), of(base_url="http://localhost:2")}
    assert len(different) == 4
    model = ChatART(model="m", base_url="http://localhost:1")
    bound = {identity(model.bind(stop=[word])) for word in ("x", "y")}
    assert len(bound | {identity(model), identity(model.with_retry())}) == 4

    def closing_over(limit: int) -> RunnableLambda[Any, Any]:
        return RunnableLambda(lambda messages: messages[1].text[:limit])

    assert identity(closing_over(1)) == identity(closing_over(1)) != identity(closing_over(2))


# ---- calls


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, JudgeCalls] = {}
    monkeypatch.setattr(
        judge_model, "_calls_of", lambda name, _: calls.setdefault(name, JudgeCalls(2))
    )


@pytest.mark.parametrize("one_object", [True, False])
def test_all_evaluators_of_a_model_share_its_calls(two_at_once: None, one_object: bool) -> None:
    now: list[str] = []
    most: list[int] = []

    def answer(request: str) -> str:
        now.append(request)
        time.sleep(0.02)
        most.append(len(now))
        now.remove(request)
        return literal(request)

    same = ScriptedJudge(answer=answer)
    judges = [same if one_object else ScriptedJudge(answer=answer) for _ in range(3)]
    jury = VoteEvaluator([RulerEvaluator(one, key=f"j{n}") for n, one in enumerate(judges)])
    groups = [RUNS.model_copy(update={"id": f"g{n}"}) for n in range(4)]
    judged = asyncio.run(jury.abatch(groups))
    assert [one.trajectories[0].reward for one in judged] == [0.9] * 4
    assert (len(most), max(most)) == (24, 2)


def test_a_call_that_takes_too_long_is_asked_again_and_frees_its_place(two_at_once: None) -> None:
    hanging = threading.Event()
    calls = iter(range(100))

    def answer(request: str) -> str:
        if next(calls) < 2:
            hanging.wait(50)
        return literal(request)

    ruler = RulerEvaluator(ScriptedJudge(answer=answer), timeout=1.0)
    assert [one.reward for one in ruler.invoke(RUNS).trajectories] == RIGHT
    assert (ruler.spent.calls, ruler.spent.unusable) == (4, 2)
    slow = RunnableLambda(lambda _: hanging.wait(50))
    with pytest.raises(JudgeError, match=r"no answer in 0\.05 s \(`timeout`\)"):
        RulerEvaluator(slow, timeout=0.05, attempts=1).invoke(RUNS)
    hanging.set()
    own = ScriptedJudge(answer=lambda _: TimeoutError("the model's"))
    with pytest.raises(JudgeError, match="TimeoutError: the model's"):
        RulerEvaluator(own, attempts=1).invoke(RUNS)
    for wrong in (0, float("nan")):
        with pytest.raises(ConfigError, match="above 0"):
            RulerEvaluator(ScriptedJudge(), timeout=wrong)


async def test_cancelling_begins_no_further_call_and_frees_the_places(two_at_once: None) -> None:
    hanging = threading.Event()
    begun: list[str] = []

    def answer(request: str) -> str:
        begun.append(request)
        hanging.wait(0 if len(begun) > 2 else 50)
        return literal(request)

    judge = ScriptedJudge(answer=answer)
    ruler = RulerEvaluator(judge)
    batch = asyncio.create_task(ruler.abatch([RUNS] * 3))
    while len(begun) < 2:
        await asyncio.sleep(0.01)
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert len(begun) == 2
    judged = await ruler.ainvoke(RUNS)  # both places are free again
    assert [one.reward for one in judged.trajectories] == RIGHT
    assert len(begun) == 4
    hanging.set()


# ---- Retry-After


class TooMany(Exception):
    def __init__(self, **headers: str) -> None:
        super().__init__("429")
        self.response = SimpleNamespace(
            headers={k.replace("_", "-"): v for k, v in headers.items()}
        )


def test_the_pause_that_is_asked_for_is_read() -> None:
    soon, past = (datetime.now(UTC) + timedelta(seconds=s) for s in (30, -9))
    assert 25 < (retry_after(TooMany(retry_after=format_datetime(soon))) or 0) <= 30
    wrapped, litellm = RuntimeError("wrapped"), ValueError("x")
    wrapped.__cause__ = TooMany(retry_after="4")
    litellm.litellm_response_headers = {"Retry-After": "5"}  # type: ignore[attr-defined]
    for error, expected in (
        (TooMany(Retry_After="2.5"), 2.5),
        (TooMany(retry_after_ms="1500", retry_after="9"), 1.5),
        (TooMany(retry_after=format_datetime(past)), 0.0),
        *((TooMany(retry_after=nothing), None) for nothing in ("soon", "-1", "nan", "inf")),
        (ValueError("x"), None),
        (Overloaded("full", retry_after=3.0), 3.0),
        (wrapped, 4.0),
        (litellm, 5.0),
    ):
        assert retry_after(error) == expected


def test_after_too_many_requests_all_calls_of_the_model_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times, paused, pause = list[float](), asyncio.Event(), JudgeCalls.pause

    def pause_and_say(calls: JudgeCalls, seconds: float) -> None:
        pause(calls, seconds)
        paused.set()

    def answer(request: str) -> Any:
        times.append(time.monotonic())
        return TooMany(retry_after="0.3") if len(times) == 1 else literal(request)

    model = ScriptedJudge(answer=answer)
    first, other = (RulerEvaluator(model, passes=1, key=key) for key in ("first", "other"))
    monkeypatch.setattr(JudgeCalls, "pause", pause_and_say)

    async def later() -> None:
        await paused.wait()
        await other.ainvoke(RUNS)

    async def both() -> None:
        await asyncio.gather(first.ainvoke(RUNS), later())

    asyncio.run(both())
    assert len(times) == 3
    assert all(one - times[0] >= 0.3 for one in times[1:])
    assert (first.spent.calls, first.spent.unusable) == (2, 1)


def test_a_pause_is_not_longer_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(JudgeCalls, "pause", lambda _, seconds: pauses.append(seconds))
    calls = iter([TooMany(retry_after="3600"), None])
    model = ScriptedJudge(answer=lambda request: next(calls, None) or literal(request))
    RulerEvaluator(model, passes=1, timeout=30.0).invoke(RUNS)
    assert pauses == [30.0]
