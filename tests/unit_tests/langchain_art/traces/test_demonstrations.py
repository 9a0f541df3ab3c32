"""Each reply of a trace is in the conversations once, behind the prompt that it answered."""

import json
from pathlib import Path
from typing import Any

from langchain_art.client.conversations import read_conversations
from langchain_art.traces.importing import conversations
from langchain_art.traces.stored import StoredTrace
from langchain_art.wire import Message, Trajectory, Turn

TOOL = {"type": "function", "function": {"name": "find"}}


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def called(asked: list[Message], reply: Message, *tools: Message, why: str | None = None) -> Turn:
    return Turn(messages=tuple(asked), reply=reply, tools=tools, excluded_because=why, ours=False)


def trace(*calls: Turn) -> StoredTrace:
    return StoredTrace(id="t", input="x", calls=calls)


def test_calls_that_continue_each_other_are_one_conversation(tmp_path: Path) -> None:
    history = [say("user", "earlier"), say("assistant", "not sampled here"), say("user", "q")]
    first = called(history, say("assistant", "a1"), TOOL)
    longer = [*history, say("assistant", "a1"), say("tool", "result")]
    second = called(longer, say("assistant", "a2"), TOOL)
    [found] = conversations(trace(first, second))
    weights = [one.get("weight", 1) for one in found["messages"] if one["role"] == "assistant"]
    assert weights == [0, 1, 1] and found["tools"] == [TOOL]
    path = tmp_path / "conversations.jsonl"
    path.write_text(json.dumps(found) + "\n")
    [read] = read_conversations(path)
    assert isinstance(read, Trajectory)
    assert [turn.reply and turn.reply["content"] for turn in read.turns] == ["a1", "a2"]
    assert read.prompt(1) == longer


def test_calls_of_different_histories_or_tools_are_conversations_of_their_own() -> None:
    first = called([say("user", "q")], say("assistant", "a1"))
    critic = called([say("system", "judge"), say("user", "q")], say("assistant", "ok"))
    longer = [say("user", "q"), say("assistant", "a1"), say("user", "go on")]
    other_tools = called(longer, say("assistant", "a2"), TOOL)
    found = conversations(trace(first, critic, other_tools))
    assert [one["messages"][-1]["content"] for one in found] == ["a1", "ok", "a2"]


def test_the_same_call_twice_is_learned_twice() -> None:
    call = called([say("user", "q")], say("assistant", "a"))
    assert len(conversations(trace(call, call))) == 2


def test_what_the_graph_discarded_is_not_shown() -> None:
    asked = [say("user", "q")]
    calls = [
        called(asked, say("assistant", f"a{n}"), why=why)
        for n, why in enumerate(("retried", "unchosen", None))
    ]
    [found] = conversations(trace(*calls))
    assert found["messages"] == [*asked, say("assistant", "a2")]
