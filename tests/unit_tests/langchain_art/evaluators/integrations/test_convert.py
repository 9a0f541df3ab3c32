from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_openai_messages,
)

from langchain_art.errors import ConfigError
from langchain_art.evaluators import as_group, run_facts
from langchain_art.evaluators.integrations.convert import as_trajectory, candidates
from tests.support.judges.groups import group, run

CALL = {"name": "search", "args": {"q": "audit"}, "id": "c1"}
MESSAGES = [
    SystemMessage("Find it."),
    HumanMessage("When?"),
    AIMessage("", tool_calls=[CALL], name="searcher"),
    ToolMessage("7: audit", tool_call_id="c1"),
    AIMessage("14 March"),
    ToolMessage("noted", tool_call_id="c2"),
]
AS_DICTS: Any = convert_to_openai_messages(MESSAGES)


@pytest.mark.parametrize(
    "output", [MESSAGES, AS_DICTS, {"messages": MESSAGES, "n": 1}, {"messages": tuple(AS_DICTS)}]
)
def test_messages_become_turns(output: Any) -> None:
    told = as_trajectory(output, "r")
    assert [turn.node for turn in told.turns] == ["searcher", None]
    assert told.turns[1].extends == 0
    assert [m["role"] for m in told.prompt(1)] == ["system", "user", "assistant", "tool"]
    assert run_facts.actions(told) == ["search"]
    assert run_facts.answer(told) == "noted"
    assert not any(turn.ours for turn in told.turns)


@pytest.mark.parametrize(
    ("output", "text", "answer"),
    [
        ("14 March", "14 March", "14 March"),
        ({"date": "14 March", "n": [1]}, '{"date": "14 March", "n": [1]}', None),
        (["a", "b"], '["a", "b"]', None),
        ([], "[]", None),
        ({"messages": []}, '{"messages": []}', "keep"),
        ({"messages": "none"}, '{"messages": "none"}', "keep"),
    ],
)
def test_anything_else_is_one_turn_that_says_it(output: Any, text: str, answer: Any) -> None:
    told = as_trajectory(output, "r")
    (turn,) = told.turns
    assert turn.reply == {"role": "assistant", "content": text}
    if answer != "keep":
        assert run_facts.answer(told) == (output if answer is None else answer)


def test_single_messages_nothing_runs_and_groups() -> None:
    for message in (AIMessage("x"), {"role": "assistant", "content": "x"}):
        assert run_facts.answer(as_trajectory(message, "r")) == "x"
        both = as_group([message, message])  # what two experiments gave, say
        assert [run_facts.steps(told) for told in both.trajectories] == [1, 1]
    nothing = as_trajectory(None, "r")
    assert nothing.turns == () and run_facts.answer(nothing) is None
    (turn,) = as_trajectory([("user", "hello?")], "r").turns  # without an answer
    assert turn.reply is None and turn.messages == ({"role": "user", "content": "hello?"},)
    one = run("mine")
    assert as_group([one]).trajectories == (one,)
    whole = group(one, id="whole")
    assert as_group(whole) is candidates(whole) is whole


@pytest.mark.parametrize(
    ("outputs", "count"),
    [
        (MESSAGES, 1),
        (("user", "hi"), 2),
        ([("user", "hi")], 1),
        ([MESSAGES, MESSAGES], 2),
        ({"messages": MESSAGES}, 1),
        ([{"messages": MESSAGES}, {"messages": AS_DICTS}], 2),
        ([{"date": 1}, {"date": 2}], 2),
        (AIMessage("x"), 1),
    ],
)
def test_a_list_is_a_group_unless_it_is_messages(outputs: Any, count: int) -> None:
    assert len(as_group(candidates(outputs)).trajectories) == count


def test_inputs_and_reference_are_the_scenario() -> None:
    asked = {"question": "When?"}
    shown = as_group(["a"], inputs=asked, reference={"answer": "b", "optimal_steps": 2})
    assert shown.metadata["scenario"] == {"input": asked, "answer": "b", "optimal_steps": 2}
    assert as_group(["a"], reference="b").metadata == {"scenario": {"answer": "b"}}
    assert as_group(["a"]).metadata == {}
    told = as_group(["a"], inputs=HumanMessage("q")).metadata["scenario"]
    assert told["input"] == {"role": "user", "content": "q"}


def test_nothing_and_nonsense_are_refused() -> None:
    with pytest.raises(ConfigError, match="no outputs"):
        as_group([])
    with pytest.raises(ConfigError, match="messages that LangChain cannot read"):
        as_trajectory([{"role": "nobody", "content": "x"}], "r")
    for one in ("14 March", {"messages": []}):
        with pytest.raises(ConfigError, match="expected a list with an output for each run"):
            as_group(one)
