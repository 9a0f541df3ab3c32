"""A chat request is bounded by what an engine can take, before an engine has it."""

from typing import Any

import pytest

from langchain_art.errors import InvalidRequest, PromptTooLong
from langchain_art_server.gateway.chat.request import ChatBody, CheckedChatRequest, refuse_oversize

SAY = [{"role": "user", "content": "When?"}]


def checked(**options: Any) -> CheckedChatRequest:
    return CheckedChatRequest({"model": "m", "messages": SAY} | options)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2**63},
        {"top_k": 2**31},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"max_tokens": 2**31},
        {"max_completion_tokens": 10**30},
        {"stop": ["x"] * 17},
        {"stop": "x" * 1025},
        {"stop": ["x" * 1025]},
        {"n": 17},
        {"messages": SAY * 4097},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
    ],
    ids=lambda options: f"{next(iter(options))}-{str(options)[:24]}",
)
def test_what_no_engine_can_take_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked(**options)
    assert refused.value.param == next(iter(options))
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2**31 - 1},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"max_tokens": 2**31 - 1},
        {"stop": ["x" * 1024] * 16},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_bounds_themselves_are_accepted(options: dict[str, Any]) -> None:
    assert checked(**options).record[next(iter(options))] == next(iter(options.values()))


def test_the_bounds_are_in_the_document() -> None:
    fields = ChatBody.model_json_schema()["properties"]
    assert fields["top_k"]["anyOf"][0]["maximum"] == 2**31 - 1
    assert fields["seed"]["anyOf"][0]["minimum"] == -(2**63)
    assert fields["max_tokens"]["anyOf"][0]["maximum"] == 2**31 - 1
    text, several, _ = fields["stop"]["anyOf"]
    assert (text["maxLength"], several["maxItems"], several["items"]["maxLength"]) == (
        1024,
        16,
        1024,
    )


def test_messages_and_tools_that_cannot_fit_are_refused_before_they_are_shown() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 500}}
    fits = ChatBody(
        model="m", messages=[*SAY, {"role": "user", "content": "w" * 300}], tools=[tool]
    )
    refuse_oversize(fits, 1000)
    with pytest.raises(PromptTooLong, match="more than 800 characters"):
        refuse_oversize(fits, 800)
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": list(range(300_000))}}}
    with pytest.raises(InvalidRequest, match="a schema of more than 262144 characters"):
        refuse_oversize(fits.model_copy(update={"response_format": schema}), 1000)
    parts = [{"type": "text", "text": ""}] * 400  # no text at all, and 400 values
    many = ChatBody(model="m", messages=[{"role": "user", "content": parts}])
    with pytest.raises(PromptTooLong):
        refuse_oversize(many, 800)


@pytest.mark.parametrize("field", ["messages", "tools", "response_format"])
def test_a_number_that_overflows_is_refused_wherever_it_is(field: str) -> None:
    far = {"a": [{"b": float("inf")}]}
    call = {"id": "c", "type": "function", "function": {"name": "x", "arguments": "{}"}, "x": far}
    values: dict[str, Any] = {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": "x", "parameters": far}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": far}},
    }
    with pytest.raises(InvalidRequest, match=f"{field}: got a number that overflows") as caught:
        checked(**{field: values[field]})
    assert caught.value.param == field
