"""Messages come back from trace stores in OpenAI's shape, whatever shape they were stored in."""

import json
from typing import Any

import pytest

from langchain_art.export.stored_messages import message_of, prompt_of, reply_of

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = {"id": "c-1", "type": "function", "function": {"name": "find", "arguments": '{"q": "é"}'}}
LANGCHAIN_CALL = {"name": "find", "args": {"q": "é"}, "id": "c-1", "type": "tool_call"}
USER = {"role": "user", "content": "When?"}


@pytest.mark.parametrize("call", [CALL, LANGCHAIN_CALL])
def test_tool_calls_of_either_shape_are_openais(call: dict[str, Any]) -> None:
    stored = {"role": "assistant", "content": None, "tool_calls": [call], "additional_kwargs": {}}
    expected = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert message_of(stored) == expected
    assert reply_of(json.dumps(stored)) == expected
    assert message_of(expected) == expected


def test_definitions_of_tools_among_the_messages_are_told_from_tools_results() -> None:
    result = {"role": "tool", "tool_call_id": "c-1", "content": '{"function": "May"}'}
    stored = [USER, result, {"role": "tool", "content": TOOL}]
    assert prompt_of(json.dumps(stored)) == ([USER, result], [TOOL])
    assert prompt_of({"messages": [USER], "tools": [TOOL]}) == ([USER], [TOOL])
    assert prompt_of("When?") == ([USER], [])


def test_langchains_roles_are_openais() -> None:
    stored = [{"type": "human", "content": "When?"}, {"type": "ai", "content": "In May."}]
    assert [one["role"] for one in prompt_of(stored)[0]] == ["user", "assistant"]


@pytest.mark.parametrize("text", ["In May.", "42", '["a"]', '{"month": "May"}'])
def test_a_text_is_the_content_of_the_reply(text: str) -> None:
    assert reply_of(text) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("stored", [None, [], "[]", {"tools": []}, ["x"], [{"content": "x"}]])
def test_what_has_no_messages_is_refused(stored: Any) -> None:
    with pytest.raises(ValueError, match="got"):
        prompt_of(stored)
    with pytest.raises(ValueError, match="'user'"):
        reply_of(USER)
