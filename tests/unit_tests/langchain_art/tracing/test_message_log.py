"""Messages in the log are those that were sent: what ChatART sends is the measure."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from langchain_art import ChatART
from langchain_art.tracing.message_log import MessageLog, wire_message

CALL: Any = {"name": "look", "args": {"what": "Tür"}, "id": "c1", "type": "tool_call"}


def sent(message: BaseMessage) -> dict[str, Any]:
    model = ChatART(model="m", base_url="http://localhost:1/v1")
    return model._get_request_payload([message])["messages"][0]


@pytest.mark.parametrize(
    "message",
    [
        SystemMessage("Be kind."),
        HumanMessage("hi", name="ann"),
        HumanMessage([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]),
        HumanMessage(""),
        ToolMessage("seen", tool_call_id="c1", name="look", status="error", artifact=[1]),
        ToolMessage([{"type": "text", "text": "seen"}], tool_call_id="c1"),
        AIMessage("hello", name="scout"),
        AIMessage("", tool_calls=[CALL]),
        AIMessage("Both.", tool_calls=[CALL, {**CALL, "id": "c2"}]),
        AIMessage("hm", additional_kwargs={"reasoning_content": "I think."}),
        AIMessage([{"type": "text", "text": "hello"}], response_metadata={"output_version": "v1"}),
        AIMessage([CALL], tool_calls=[CALL], response_metadata={"output_version": "v1"}),
        AIMessage(
            [{"type": "text", "text": "Both."}, CALL],
            tool_calls=[CALL],
            response_metadata={"output_version": "v1"},
        ),
    ],
)
def test_a_message_is_kept_as_it_is_sent(message: BaseMessage) -> None:
    assert wire_message(message) == sent(message)


def test_reasoning_in_blocks_is_kept_beside_the_text() -> None:
    for kind in ("reasoning", "thinking"):
        blocks: list[Any] = [{"type": kind, kind: "hm"}, {"type": "text", "text": "a"}]
        wire = wire_message(AIMessage(blocks))
        assert wire["content"] == [{"type": "text", "text": "a"}]
        assert wire["reasoning_content"] == "hm"
    for odd in ({"type": "reasoning", "summary": []}, {"type": "thinking", "thinking": None}):
        assert wire_message(AIMessage([odd])) == {"role": "assistant", "content": []}


def test_a_broken_tool_call_is_kept_as_it_was_said() -> None:
    broken: Any = {"name": "look", "args": "{", "id": "c1", "error": "no", "type": None}
    wire = wire_message(AIMessage("", invalid_tool_calls=[broken]))
    assert wire["tool_calls"][0]["function"] == {"name": "look", "arguments": "{"}
    assert wire["content"] is None


def test_an_extra_choice_that_says_the_same_is_not_what_prompts_continue() -> None:
    log = MessageLog()
    hi, reply = HumanMessage("hi"), AIMessage("hello")
    prompt = log.add_prompt([hi], "a:1")
    log.add_reply(0, prompt, reply, "a:1")
    log.add_reply(1, prompt, AIMessage("hello"), "a:1", extra_choice=True)
    log.add_reply(2, prompt, AIMessage("other"), "a:1", extra_choice=True)
    assert log.add_prompt([hi, reply, hi], "a:1").extends == 0
    assert log.add_prompt([hi, AIMessage("other"), hi], "a:1").extends == 2
