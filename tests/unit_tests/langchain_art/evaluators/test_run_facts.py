import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool as as_tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from langchain_art import capture
from langchain_art.evaluators import run_facts
from langchain_art.wire import Trajectory, Turn
from tests.support.judges.groups import calls, run, says, tool


def test_steps_and_actions_leave_out_what_the_graph_threw_away() -> None:
    kept = Turn(reply=calls("search", "read"))
    retried = Turn(reply=calls("delete"), excluded_because="retried", error="boom")
    told = Trajectory(id="a", turns=(retried, kept, Turn(reply=calls("read"))))
    assert run_facts.steps(told) == 2
    assert run_facts.actions(told) == ["search", "read", "read"]
    assert run_facts.errors(told) == 0


def test_errors_are_failed_calls_bad_arguments_and_refused_tools() -> None:
    turns = (
        Turn(reply=calls("search", arguments='{"q"')),
        Turn(reply=calls("search", arguments="[1]"), messages=(tool("fine: Error: is a word"),)),
        Turn(error="Timeout", messages=(tool("Error: search is not a valid tool"),)),
    )
    output = {"messages": [says("x"), tool("Error invoking tool 'answer' with kwargs …")]}
    assert run_facts.errors(Trajectory(id="a", turns=turns, output=output)) == 5
    assert run_facts.errors(Trajectory(id="a", turns=turns)) == 4


def test_an_error_that_several_calls_were_shown_counts_once() -> None:
    user, asked, refused = says("When?") | {"role": "user"}, calls("search"), tool("Error: no such")
    agent = Turn(messages=(user,), reply=asked)
    answered = Turn(messages=(refused,), reply=says("?"), extends=0)
    whole = (user, asked, refused, says("?"))
    others = [Turn(node=name, messages=whole, reply=says("!")) for name in ("critic", "writer")]
    told = Trajectory(id="a", turns=(agent, answered, *others), output={"messages": [refused]})
    assert run_facts.errors(told) == 1
    again = [one | {"tool_call_id": "2"} for one in (refused, refused)]
    ended = told.model_copy(update={"output": {"messages": again}})
    assert run_facts.errors(ended) == 2
    unnamed = {"role": "tool", "content": "Error: no such"}
    assert run_facts.errors(run("a", output={"messages": [unnamed, unnamed]})) == 2


@as_tool
def fragile(number: int) -> str:
    """Raises."""
    raise ValueError(f"no {number}")


@pytest.mark.parametrize("asked", [("missing", {}), ("fragile", {}), ("fragile", {"number": 1})])
async def test_langgraphs_tool_errors_are_known(asked: tuple[str, dict[str, int]]) -> None:
    called = AIMessage("", tool_calls=[{"name": asked[0], "args": asked[1], "id": "1"}])
    model = GenericFakeChatModel(messages=iter([called, AIMessage("sorry")]))
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([fragile], handle_tool_errors=True))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    async with capture() as scope:
        await graph.compile().ainvoke({"messages": [("user", "go")]})
    told = scope.trajectory()
    assert run_facts.errors(told) == 1
    assert run_facts.steps(told) == 2
    assert run_facts.actions(told) == [asked[0]]
    assert run_facts.answer(told) == "sorry"


def test_seconds_span_the_calls_or_are_the_known_latencies() -> None:
    first, last = Turn(started_at=5.0, latency=2.0), Turn(started_at=9.0, latency=1.5)
    assert run_facts.seconds(Trajectory(id="a", turns=(first, last))) == pytest.approx(5.5)
    assert run_facts.seconds(Trajectory(id="a", turns=(first, Turn(latency=1.0)))) == 3.0
    assert run_facts.seconds(Trajectory(id="a")) == 0.0


def test_the_answer_is_the_output_else_the_last_reply() -> None:
    blocks = {"role": "assistant", "content": [{"type": "text", "text": "a"}, "b"]}
    assert run_facts.answer(run("a", says("x"), output={"messages": [says("y")]})) == "y"
    assert run_facts.answer(run("a", says("x"), output={"date": "14"})) == {"date": "14"}
    assert run_facts.answer(run("a", says("x"), blocks)) == "a\nb"
    assert run_facts.answer(run("a", calls("search"))) == ""
    assert run_facts.answer(run("a")) is None
    assert run_facts.answer(run("a", output={"messages": []})) is None
    assert run_facts.answer(run("a", output={"messages": [says("")]})) == ""


def test_a_state_whose_messages_are_no_chat_messages_is_read() -> None:
    for messages, answer in (
        (["x", "hello"], "hello"),
        ([says("x"), 3], "3"),
        ({"to": "Ann"}, {"messages": {"to": "Ann"}}),
    ):
        told = run("a", says("y"), output={"messages": messages})
        assert run_facts.answer(told) == answer
        assert run_facts.errors(told) == 0
