"""Messages in the log are those that were sent: what ChatART sends is the measure."""

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from langchain_art import ChatART, capture
from langchain_art.tracing.message_log import MessageLog, SampledReply, jsonable, wire_message

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
    log.add_reply(0, prompt, SampledReply.of(reply), "a:1")
    log.add_reply(1, prompt, SampledReply.of(AIMessage("hello")), "a:1", extra_choice=True)
    log.add_reply(2, prompt, SampledReply.of(AIMessage("other")), "a:1", extra_choice=True)
    assert log.add_prompt([hi, reply, hi], "a:1").extends == 0
    assert log.add_prompt([hi, AIMessage("other"), hi], "a:1").extends == 2


def test_of_equal_replies_a_prompt_continues_the_one_whose_id_it_repeats() -> None:
    log = MessageLog()
    hi = HumanMessage("hi")
    for call, id in enumerate(["one", "two", "both", "both"]):
        prompt = log.add_prompt([hi], f"a:{call}")
        log.add_reply(call, prompt, SampledReply.of(AIMessage("hello", id=id)), f"a:{call}")

    def extended(id: str | None) -> int | None:
        return log.add_prompt([hi, AIMessage("hello", id=id), hi], "a:1").extends

    assert [extended(id) for id in ("one", "two", "both", "new", None)] == [0, 1, 1, 1, 1]


EDITS: list[Callable[[AIMessage], object]] = [
    lambda reply: setattr(reply, "content", "clean"),
    lambda reply: setattr(reply, "content", [{"type": "text", "text": "clean"}]),
    lambda reply: reply.tool_calls[0]["args"].update(what="window"),
    lambda reply: reply.tool_calls[0]["args"].update(what=object()),
    lambda reply: setattr(reply, "tool_calls", []),
    lambda reply: reply.additional_kwargs.update(reasoning_content="no"),
]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("more", [{}, {"reasoning_content": "hm"}])
def test_an_edited_reply_is_told_from_what_was_sampled(edit: Any, more: dict[str, Any]) -> None:
    reply = AIMessage(
        "so", tool_calls=[{**CALL, "args": {"what": "Tür"}}], additional_kwargs={**more}
    )
    sampled, before = SampledReply.of(reply), wire_message(reply)
    assert sampled.edited() is None
    log, hi = MessageLog(), HumanMessage("hi")
    prompt = log.add_prompt([hi], "a:1")
    edit(reply)
    assert sampled.edited() == wire_message(reply) != before
    assert log.add_reply(0, prompt, sampled, "a:1") == before
    assert log.add_prompt([hi, reply, hi], "a:1").extends is None


@pytest.mark.parametrize("edit", EDITS)
def test_a_reply_that_is_edited_once_it_is_in_a_prompt(edit: Any) -> None:
    reply = AIMessage("so", tool_calls=[{**CALL, "args": {"what": "Tür"}}])
    before = wire_message(reply)
    log, hi = MessageLog(), HumanMessage("hi")
    log.add_reply(0, log.add_prompt([hi], "a:1"), SampledReply.of(reply), "a:1")
    assert log.add_prompt([hi, reply, hi], "a:1").extends == 0
    edit(reply)
    assert log.add_prompt([hi, reply, hi], "a:1").extends is None
    assert log.messages[1] == before


@pytest.mark.parametrize("kind", [HumanMessage, SystemMessage, AIMessage])
@pytest.mark.parametrize(
    "edit",
    [
        lambda blocks: blocks[0].update(text="new"),
        lambda blocks: blocks[1]["image_url"].update(url="https://b"),
        lambda blocks: blocks.append({"type": "text", "text": "more"}),
        lambda blocks: blocks.clear(),
    ],
)
def test_blocks_that_are_changed_in_place_between_two_prompts(kind: Any, edit: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://a"}}
    message = kind([{"type": "text", "text": "old"}, image])
    log, before = MessageLog(), wire_message(message.model_copy(deep=True))

    def prompt() -> Any:
        found = log.add_prompt([message, HumanMessage("hi")], "a:1")
        return log.messages[found.new[0]]

    assert prompt() == before
    edit(message.content)
    assert prompt() == wire_message(message) != before
    assert log.messages[0] == before


@pytest.mark.parametrize("number", [True, 1.0, 2])
def test_a_number_that_is_changed_in_place(number: Any) -> None:
    reply, hi = AIMessage("", tool_calls=[{**CALL, "args": {"what": [1]}}]), HumanMessage("hi")
    sampled, log = SampledReply.of(reply), MessageLog()
    log.add_reply(0, log.add_prompt([hi], "a:1"), sampled, "a:1")
    assert log.add_prompt([hi, reply, hi], "a:1").extends == 0
    reply.tool_calls[0]["args"]["what"][0] = number
    assert sampled.edited() == wire_message(reply)
    assert log.add_prompt([hi, reply, hi], "a:1").extends is None


@pytest.mark.parametrize(
    ("message", "edit"),
    [
        (ToolMessage("so", tool_call_id="a"), lambda m: setattr(m, "tool_call_id", "b")),
        (AIMessage("so"), lambda m: m.tool_calls.append({**CALL, "args": {}})),
        (AIMessage("so"), lambda m: m.invalid_tool_calls.append({**CALL, "args": "{"})),
        (AIMessage("so"), lambda m: m.additional_kwargs.update(refusal="no")),
        (SystemMessage("so"), lambda m: m.additional_kwargs.update(__openai_role__="developer")),
        (HumanMessage("so"), lambda m: setattr(m, "name", "Ann")),
    ],
)
def test_fields_that_are_changed_in_place_between_two_prompts(message: Any, edit: Any) -> None:
    log, before = MessageLog(), wire_message(message)
    log.add_prompt([message], "a:1")
    edit(message)
    after = log.add_prompt([message], "a:1")
    assert [log.messages[number] for number in after.new] == [wire_message(message)] != [before]
    assert log.messages[0] == before


def test_an_artifact_that_cannot_be_compared_is_no_error() -> None:
    message = ToolMessage("so", tool_call_id="a", artifact=numpy.zeros(2))
    log = MessageLog()
    first = log.add_prompt([message], "a:1")
    message.artifact = numpy.ones(2)
    assert log.add_prompt([message], "a:1").new == first.new


def test_an_image_that_langchain_copies_for_each_call_is_kept_once() -> None:
    model = FakeListChatModel(responses=["ok"])
    image = {"type": "image", "base64": "AAAA" * 250_000, "mime_type": "image/png"}
    history: list[Any] = [HumanMessage([image])]
    with capture() as run:
        tracemalloc.start()
        for _ in range(10):
            history.append(model.invoke(history))
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert kept < 3_000_000
    assert [turn.extends for turn in run.turns] == [None, *range(9)]


def test_a_message_is_converted_once() -> None:
    log = MessageLog()
    blocks = [HumanMessage([{"type": "text", "text": str(number)}]) for number in range(9)]
    first = log.add_prompt(blocks, "a:1")
    assert log.add_prompt(blocks, "a:1").new == first.new
    assert len(log.messages) == 9


def test_arrays_in_a_tool_call_are_compared_without_an_error() -> None:
    reply = AIMessage("", tool_calls=[{**CALL, "args": {"what": numpy.zeros(2)}}])
    log = MessageLog()
    assert log.add_prompt([reply], "a:1").new == log.add_prompt([reply], "a:1").new
    reply.tool_calls[0]["args"]["what"] = numpy.zeros(2)
    assert len(log.add_prompt([reply], "a:1").new) == 1


@pytest.mark.parametrize("content", ["so", [{"type": "text", "text": "so"}]])
def test_a_signed_reply_is_what_was_sampled(content: Any) -> None:
    reply = AIMessage(content)
    sampled = SampledReply.of(reply)
    log, hi = MessageLog(), HumanMessage("hi")
    prompt = log.add_prompt([hi], "a:1")
    reply.name = "scout"
    assert sampled.edited() is None
    assert log.add_reply(0, prompt, sampled, "a:1") == wire_message(reply)
    assert log.add_prompt([hi, reply, hi], "a:1").extends == 0
    assert log.add_prompt([hi, reply.model_copy(), hi], "a:1").extends == 0


def test_arguments_that_are_no_json_are_no_edit() -> None:
    reply = AIMessage("so", tool_calls=[{**CALL, "args": {"what": {1, 2}}}])
    sampled = SampledReply.of(reply)
    assert sampled.edited() is None
    reply.tool_calls = [dict(call) for call in reply.tool_calls]  # type: ignore[misc]
    reply.content = "so ".strip()
    assert sampled.edited() is None


@dataclass
class Node:
    name: str
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list["Node"])


def test_a_value_within_itself_is_not_written_again() -> None:
    """All ways through a tree whose nodes know their parent were written: 2^16 of this one."""
    root = Node("root")
    root.children = [Node(name, root) for name in "ab"]
    a, b = ({"name": name, "parent": "…", "children": []} for name in "ab")
    tree = {"name": "root", "parent": None, "children": [a, b]}
    best = a | {"parent": tree | {"children": ["…", b]}}
    assert jsonable({"tree": root, "best": root.children[0]}) == {"tree": tree, "best": best}


def test_a_set_is_a_sorted_list() -> None:
    assert jsonable([{8, 0}, {0, 8}, frozenset({"b", "a"})]) == [[0, 8], [0, 8], ["a", "b"]]
