from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from langchain_core.messages import ToolCall

from examples.function_calling.leaderboard import Grade, Question, grade

WEATHER: dict[str, Any] = {
    "name": "weather.get",
    "parameters": {
        "properties": {name: {"type": "string"} for name in ("city", "unit", "days")},
        "required": ["city"],
    },
}
QUESTION = Question(
    "q",
    "Will it rain in Paris for 2 days?",
    (WEATHER,),
    WEATHER,
    {"city": ["Paris", "Paris, France"], "unit": ["celsius", ""], "days": [2]},
)


def equal(
    function: Mapping[str, Any], arguments: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]
) -> bool:
    """Each argument has one of the values allowed, and those left out may be."""
    assert set(allowed) <= set(function["parameters"]["properties"])
    needed = {name for name, values in allowed.items() if "" not in values}
    return needed <= set(arguments) and all(
        value in allowed.get(name, ()) for name, value in arguments.items()
    )


def calls(*arguments: dict[str, Any], name: str = "weather_get") -> list[ToolCall]:
    return [ToolCall(name=name, args=one, id=str(n)) for n, one in enumerate(arguments)]


RIGHT: dict[str, Any] = {"city": "Paris", "days": 2}


@pytest.mark.parametrize(
    ("made", "share"),
    [
        (calls(RIGHT), 1.0),
        (calls(RIGHT | {"unit": "celsius"}), 1.0),
        (calls(RIGHT | {"unit": "kelvin"}), 2 / 3),
        (calls(RIGHT | {"colour": "red"}), 2 / 3),
        (calls({"city": "Paris"}), 1 / 2),
        (calls({"city": "Rome", "days": 2, "unit": "celsius"}), 2 / 3),
        (calls({}), 0.0),
    ],
)
def test_a_call_of_the_right_function_is_worth_its_right_arguments(
    made: list[ToolCall], share: float
) -> None:
    found = grade(QUESTION, made, equal)
    assert found.reward == pytest.approx(share)
    assert found.correct == (share == 1.0)


@pytest.mark.parametrize(
    "made", [[], calls(RIGHT, RIGHT), calls(RIGHT, name="weather.get"), calls(RIGHT, name="clock")]
)
def test_another_call_and_none_and_two_are_worth_nothing(made: list[ToolCall]) -> None:
    assert grade(QUESTION, made, equal) == Grade(0.0, False)
