"""Values of graphs as they are shown, and messages as trace stores keep them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.types import Command

from langchain_art.export.brief import ENTRIES, brief, last_message, tool_result
from langchain_art.export.stored_messages import message_of, prompt_of, reply_of

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
values = st.recursive(
    leaves,
    lambda s: st.lists(s) | st.dictionaries(st.text(), s) | st.builds(AIMessage, st.text()),
    max_leaves=20,
)


@settings(max_examples=40)
@given(values)
def test_any_value_becomes_strict_json(value: Any) -> None:
    json.dumps(brief(value), allow_nan=False)


def test_what_is_cut_says_so() -> None:
    assert brief("a" * 10, 4) == "aaaa… (10 characters)"
    assert brief(["a" * 3, "b" * 3], 4) == ["aaa", "b… (3 characters)"]
    assert brief(list(range(ENTRIES + 1)))[-1] == f"… ({ENTRIES + 1} in all)"
    assert brief({n: n for n in range(ENTRIES + 1)})["…"] == f"({ENTRIES + 1} entries in all)"


def test_what_graphs_pass_on_is_readable() -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for value, shown in (
        (HumanMessage("hi"), said[0]),
        (Command(update={"a": 1}, goto="b"), {"update": {"a": 1}, "goto": "b"}),
        ({"messages": [("user", "hi")]}, {"messages": said[:1]}),
        ({"messages": [["ai", "ho"], "x"]}, {"messages": [said[1], "x"]}),
        ({"messages": [["new", "york"]]}, {"messages": [["new", "york"]]}),
        ({"pairs": [("user", "hi")]}, {"pairs": [["user", "hi"]]}),
    ):
        assert brief(value) == shown
    state = {"messages": [HumanMessage("hi"), AIMessage("ho")], "n": 1}
    assert last_message(state) == {"messages": [state["messages"][1]], "n": 1}
    assert last_message("text") == "text"
    assert tool_result(ToolMessage("found", tool_call_id="c")) == "found"


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
    stored = [{"type": "human", "content": "When?"}, {"type": "ai", "content": "In May."}]
    assert [one["role"] for one in prompt_of(stored)[0]] == ["user", "assistant"]


@pytest.mark.parametrize("text", ["In May.", '["a"]', '{"month": "May"}'])
def test_a_text_is_the_content_of_the_reply(text: str) -> None:
    assert reply_of(text) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("stored", [None, [], "[]", {"tools": []}, ["x"], [{"content": "x"}]])
def test_what_has_no_messages_is_refused(stored: Any) -> None:
    with pytest.raises(ValueError, match="got"):
        prompt_of(stored)
    with pytest.raises(ValueError, match="'user'"):
        reply_of(USER)
