"""The function calling example: the leaderboard's package, and the agent on a hosted model."""

from typing import Any

import pytest

from examples.function_calling.agent import CALLER_PROMPT
from examples.function_calling.leaderboard import called, grade, questions, solved
from examples.function_calling.train import make_rollout
from tests.support.examples import HostedModel, calling
from tests.support.real_models import leaderboard


@pytest.fixture(scope="module", autouse=True)
def package() -> None:
    leaderboard()


def test_a_third_of_the_questions_is_held_out_and_of_each_kind() -> None:
    train, held_out = questions("train"), questions("held out")
    assert (len(train), len(held_out)) == (479, 220)
    assert not {one.request for one in train} & {one.request for one in held_out}
    for part in (train, held_out):
        kinds = {one.id.split("_")[0] for one in part}
        assert kinds == {"simple", "multiple", "live"}
        assert any(len(one.functions) > 1 for one in part)


def test_the_leaderboards_checker_takes_each_answer_of_its_own_and_no_other() -> None:
    for one in (*questions("train"), *questions("held out")):
        [call] = getattr(solved(one)[1], "tool_calls")  # noqa: B009
        assert grade(one, [call]).correct and grade(one, [call]).reward == pytest.approx(1.0)
        strange = call | {"args": {**call["args"], "none-of-its-arguments": 1}}
        assert not grade(one, [strange]).correct and grade(one, [strange]).reward < 1
        for name in one.needed:
            less = call | {"args": {k: v for k, v in call["args"].items() if k != name}}
            assert not grade(one, [less]).correct and grade(one, [less]).reward < 1


async def test_the_agent_runs_on_a_hosted_model() -> None:
    asked = {one.request: one for one in questions("held out")[::20]}

    def caller(body: dict[str, Any]) -> dict[str, Any]:
        system, *shots, user = body["messages"]
        assert system["content"] == CALLER_PROMPT and len(shots) == 3
        assert body["tool_choice"] == "required" and body["parallel_tool_calls"] is False
        one = asked[user["content"]]
        told = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
        assert set(told) == {called(each) for each in one.functions}
        assert all(each["type"] == "object" for each in told.values())
        [call] = getattr(solved(one)[1], "tool_calls")  # noqa: B009
        return calling(call["name"], **call["args"])

    with HostedModel(caller) as hosted:
        rollout = make_rollout(hosted.chat, solved(questions("train")[0]))
        runs = [await rollout(one) for one in asked.values()]
    assert {run.reward for run in runs} == {1.0}
    assert {run.scores["correct"] for run in runs} == {1.0}
