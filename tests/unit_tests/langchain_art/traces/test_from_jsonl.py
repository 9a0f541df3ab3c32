"""Exported traces of each shape are read as what they are, and what cannot be read is counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from langchain_art.client.conversations import read_conversations
from langchain_art.errors import ConfigError
from langchain_art.traces.from_jsonl import read_file
from langchain_art.traces.importing import conversations
from langchain_art.traces.stored import StoredTrace
from langchain_art.wire import Message, Trajectory, Turn
from langchain_art.wire.identifiers import scenario_name

USER = {"role": "user", "content": "When?"}
ANSWER = {"role": "assistant", "content": "In May."}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = {"id": "c-1", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}


def file(folder: Path, *lines: Any) -> Path:
    path = folder / "traces.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_conversation_is_a_trace_of_one_call(tmp_path: Path) -> None:
    line = {"messages": [USER, ANSWER], "tools": [TOOL], "score": 0.5, "call_id": "chatcmpl-1"}
    named = [7, "q" * 300, {"id": "may", "q": "When?"}, None]
    others = [{"messages": [USER, ANSWER], "scenario": one} for one in named]
    read = read_file(file(tmp_path, line, {"messages": [USER]}, *others))
    trace, *scenarios = read.traces
    [call] = trace.calls
    assert (trace.input, trace.output, trace.score) == ("When?", "In May.", 0.5)
    assert (call.messages, call.reply, call.tools) == ((USER,), ANSWER, (TOOL,))
    assert call.call_id == "chatcmpl-1"
    expected = ["7", scenario_name("q" * 300), "may", None]  # as a fit names them
    assert [one.scenario for one in scenarios] == expected
    assert read.unreadable == {"unknown_shape": 1}


LLM = {"id": "r", "run_type": "llm", "inputs": {"messages": [USER]}, "outputs": {"message": ANSWER}}
TURN = {
    "node_id": "c",
    "request": {"messages": [USER]},
    "response": {"choices": [{"message": ANSWER}]},
    "loss_mask": [1],
}
TRACE = {"schema_version": 1, "turns": [TURN]}


@pytest.mark.parametrize(
    ("line", "odd"),
    [
        ({"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER | {"tool_calls": "find"}]}),
        (LLM, {"inputs": {"messages": ["When?"]}}),
        (LLM, {"outputs": "In May."}),
        (LLM, {"extra": {"invocation_params": {"tools": 1}}}),
        (LLM, {"feedback_stats": "good"}),
        (TRACE, {"turns": [TURN | {"metadata": "none"}]}),
        (TRACE, {"schema_version": 2}),
    ],
)
def test_a_line_of_an_odd_shape_is_counted_and_the_others_are_read(
    tmp_path: Path, line: dict[str, Any], odd: dict[str, Any]
) -> None:
    read = read_file(file(tmp_path, line, line | {"id": "s", "trace_id": "s"} | odd))
    assert len(read.traces) == 1
    assert read.unreadable == {"unknown_shape": 1}


def langsmith(trace: str, *calls: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a trace: its root, and calls, the last one first."""
    root: dict[str, Any] = {"id": trace, "trace_id": trace, "run_type": "chain", "start_time": "1"}
    root |= {"inputs": {"question": "When?"}, "outputs": {"answer": "In May."}}
    root |= {"feedback_stats": {"human_reward": {"n": 2, "avg": 0.75}}}
    more = {"invocation_params": {"tools": [TOOL]}, "metadata": {"langgraph_node": "agent"}}
    llm = root | {"parent_run_id": trace, "run_type": "llm", "extra": more}
    made = [llm | {"id": f"{trace}-{n}", "start_time": f"{n}"} | one for n, one in enumerate(calls)]
    return [*reversed(made), root]


@pytest.mark.parametrize("nothing", [None, {}, {"generations": [[]], "llm_output": None}])
def test_runs_of_langsmith_are_traces_with_their_calls_in_order_without_those_that_failed(
    tmp_path: Path, nothing: Any
) -> None:
    asked = [SystemMessage("Be brief."), HumanMessage("When?")]
    called = AIMessage(
        "",
        tool_calls=[{"name": "find", "args": {"q": "x"}, "id": "c-1"}],
        response_metadata={"call_id": "chatcmpl-1", "model_name": "agent@3"},
    )
    answered = AIMessage("In May.", response_metadata={"id": "chatcmpl-2"})

    def call(*prompt: Any, said: AIMessage) -> dict[str, Any]:
        given = {"messages": [[dumpd(one) for one in prompt]]}
        return {"inputs": given, "outputs": {"generations": [[{"message": dumpd(said)}]]}}

    first, later = (
        call(*asked, said=called),
        call(*asked, called, ToolMessage("May", tool_call_id="c-1"), said=answered),
    )
    failed = first | {"error": "429", "outputs": nothing}  # and was made again
    runs = langsmith("t", first, failed, later)
    runs += [*langsmith("failed", failed), *langsmith("odd", first | {"outputs": nothing})]
    read = read_file(file(tmp_path, *runs))
    [trace] = read.traces
    assert (trace.input, trace.score) == ({"question": "When?"}, 0.75)
    one, other = trace.calls
    assert (one.call_id, one.model, one.node) == ("chatcmpl-1", "agent@3", "agent")
    assert [message["role"] for message in one.messages] == ["system", "user"]
    assert one.reply is not None and one.reply["tool_calls"] == [CALL]
    assert one.tools == (TOOL,)
    assert other.messages[2] == one.reply
    assert other.messages[3] == {"role": "tool", "content": "May", "tool_call_id": "c-1"}
    assert (other.reply, other.call_id) == (ANSWER, "chatcmpl-2")
    assert read.unreadable == {"no_calls": 1, "unknown_shape": 1}


def test_observations_of_langfuse_are_traces(tmp_path: Path) -> None:
    base = {"traceId": "t-1", "startTime": "2026-11-20T10:00:00Z", "projectId": "p"}
    root = base | {"id": "r", "type": "AGENT", "isRootObservation": True, "input": '{"q": 1}'}
    call = base | {
        "id": "c",
        "type": "GENERATION",
        "parentObservationId": "r",
        "model": "gpt",
        "input": json.dumps([USER, {"role": "tool", "content": TOOL}]),
        "output": json.dumps({"role": "assistant", "content": "In May."}),
    }
    lost = call | {"traceId": "t-2", "id": "d"}
    odd = [one | {"traceId": "t-3"} for one in (root, call | {"output": None})]
    again = [  # ClickHouse has not merged them yet
        call | {"output": "In June.", "updatedAt": "2026-11-20T10:00:01Z"},
        call | {"updatedAt": "2026-11-20T10:00:02Z"},
    ]
    read = read_file(file(tmp_path, *again, root, lost, *odd))
    [trace] = read.traces
    assert trace.input == {"q": 1}
    [one] = trace.calls
    assert (one.messages, one.tools, one.reply, one.model) == ((USER,), (TOOL,), ANSWER, "gpt")
    assert read.unreadable == {"no_root": 1, "unknown_shape": 1}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "expected one of them"),
        ([{"question": "x"}], "value 1 is"),
        ([["x"]], "value 1 is"),
        ([{"messages": [USER, ANSWER]}, {"run_type": "llm"}], "expected one of them in all"),
        ([{"traceId": "t"}], "no observation of Langfuse"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, lines: list[Any], words: str) -> None:
    path = file(tmp_path, *lines)
    with pytest.raises(ConfigError, match=words):
        read_file(path)
    path.write_bytes(json.dumps({"messages": [USER, ANSWER]}).encode() + b'\n{"q": "caf\xe9"}\n')
    with pytest.raises(ConfigError, match=r"traces\.jsonl is not in UTF-8: .*0xe9.*Save it"):
        read_file(path)


# ---- what of a trace is shown to a model


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def shown(*calls: tuple[list[Message], str, tuple[Message, ...], str | None]) -> list[Any]:
    """The conversations of a trace of these calls: prompt, reply, tools, why one is excluded."""
    turns = [
        Turn(
            messages=tuple(asked),
            reply=say("assistant", reply),
            tools=tools,
            excluded_because=why,  # type: ignore[arg-type]
            ours=False,
        )
        for asked, reply, tools, why in calls
    ]
    return conversations(StoredTrace(id="t", input="x", calls=turns))


def test_calls_that_continue_each_other_are_one_conversation(tmp_path: Path) -> None:
    history = [say("user", "earlier"), say("assistant", "not sampled here"), say("user", "q")]
    longer = [*history, say("assistant", "a1"), say("tool", "result")]
    [found] = shown((history, "a1", (TOOL,), None), (longer, "a2", (TOOL,), None))
    weights = [one.get("weight", 1) for one in found["messages"] if one["role"] == "assistant"]
    assert weights == [0, 1, 1] and found["tools"] == [TOOL]
    [read] = read_conversations(file(tmp_path, found))
    assert isinstance(read, Trajectory)
    assert [turn.reply and turn.reply["content"] for turn in read.turns] == ["a1", "a2"]
    assert read.prompt(1) == longer


def test_other_histories_tools_and_repeated_calls_are_conversations_of_their_own() -> None:
    asked = [say("user", "q")]
    longer = [*asked, say("assistant", "a1"), say("user", "go on")]
    found = shown(
        (asked, "a0", (), "retried"),  # what the graph discarded is not shown
        (asked, "a1", (), None),
        ([say("system", "judge"), *asked], "ok", (), None),
        (longer, "a2", (TOOL,), None),
        (asked, "a1", (), None),
    )
    assert [one["messages"][-1]["content"] for one in found] == ["a1", "ok", "a2", "a1"]
