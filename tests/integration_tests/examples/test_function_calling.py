"""The function calling example: the leaderboard's package, and the agent on a hosted model."""

import pytest

from examples.function_calling.leaderboard import grade, questions, solved
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
