import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.types import Command

from langchain_art.export.brief import ENTRIES, brief, last_message, tool_result

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
values = st.recursive(
    leaves, lambda s: st.lists(s) | st.dictionaries(st.text(), s) | st.builds(AIMessage, st.text())
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


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (HumanMessage("hi"), {"role": "user", "content": "hi"}),
        (Command(update={"a": 1}, goto="b"), {"update": {"a": 1}, "goto": "b"}),
        (float("nan"), "nan"),
        ({"messages": [("user", "hi")]}, {"messages": [{"role": "user", "content": "hi"}]}),
        (
            {"messages": [["ai", "ho"], "x"]},
            {"messages": [{"role": "assistant", "content": "ho"}, "x"]},
        ),
        ({"messages": [["new", "york"]]}, {"messages": [["new", "york"]]}),
        ({"pairs": [("user", "hi")]}, {"pairs": [["user", "hi"]]}),
    ],
)
def test_what_graphs_pass_on_is_readable(value: Any, shown: Any) -> None:
    assert brief(value) == shown


def test_the_answer_is_the_last_message() -> None:
    state = {"messages": [HumanMessage("hi"), AIMessage("ho")], "n": 1}
    assert last_message(state) == {"messages": [state["messages"][1]], "n": 1}
    assert last_message("text") == "text"
    assert tool_result(ToolMessage("found", tool_call_id="c")) == "found"
