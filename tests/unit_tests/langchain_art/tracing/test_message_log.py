"""Messages in the log are those that were sent: what ChatART sends is the measure."""

import json
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


def test_messages_of_blocks_are_kept_as_they_are_sent() -> None:
    texts: list[Any] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    v1 = {"output_version": "v1"}
    for message in (
        HumanMessage(texts),
        ToolMessage(texts, tool_call_id="c1"),
        AIMessage(texts, response_metadata=v1),
        AIMessage([CALL], tool_calls=[CALL], response_metadata=v1),
        AIMessage([*texts, CALL], tool_calls=[CALL], response_metadata=v1),
    ):
        assert wire_message(message) == sent(message)


def test_reasoning_in_blocks_is_kept_beside_the_text() -> None:
    for kind in ("reasoning", "thinking"):
        blocks: list[Any] = [{"type": kind, kind: "hm"}, {"type": "text", "text": "a"}]
        wire = wire_message(AIMessage(blocks))
        assert wire["content"] == [{"type": "text", "text": "a"}]
        assert wire["reasoning_content"] == "hm"
    for odd in ({"type": "reasoning", "summary": []}, {"type": "thinking", "thinking": None}):
        assert wire_message(AIMessage([odd])) == {"role": "assistant", "content": []}


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


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        (HumanMessage, lambda m: m.content[0].update(text="new")),
        (SystemMessage, lambda m: m.content[1]["image_url"].update(url="https://b")),
        (AIMessage, lambda m: m.content.append({"type": "text", "text": "more"})),
        (AIMessage, lambda m: m.content.clear()),
        (AIMessage, lambda m: m.tool_calls.append({**CALL, "args": {}})),
        (AIMessage, lambda m: m.invalid_tool_calls.append({**CALL, "args": "{"})),
        (AIMessage, lambda m: m.additional_kwargs.update(refusal="no")),
        (SystemMessage, lambda m: m.additional_kwargs.update(__openai_role__="developer")),
        (HumanMessage, lambda m: setattr(m, "name", "Ann")),
        (
            lambda blocks: ToolMessage(blocks, tool_call_id="a"),
            lambda m: setattr(m, "tool_call_id", "b"),
        ),
    ],
)
def test_a_message_that_is_changed_in_place_between_two_prompts(kind: Any, edit: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://a"}}
    message = kind([{"type": "text", "text": "old"}, image])
    log, before = MessageLog(), wire_message(message.model_copy(deep=True))

    def prompt() -> Any:
        found = log.add_prompt([message, HumanMessage("hi")], "a:1")
        return log.messages[found.new[0]]

    assert prompt() == before
    edit(message)
    assert prompt() == wire_message(message) != before
    assert log.messages[0] == before


@pytest.mark.parametrize("number", [True, 1.0, 2])
def test_a_number_that_is_changed_in_place_once_its_reply_is_in_a_prompt(number: Any) -> None:
    reply, hi = AIMessage("", tool_calls=[{**CALL, "args": {"what": [1]}}]), HumanMessage("hi")
    sampled, log, before = SampledReply.of(reply), MessageLog(), wire_message(reply)
    log.add_reply(0, log.add_prompt([hi], "a:1"), sampled, "a:1")
    assert log.add_prompt([hi, reply, hi], "a:1").extends == 0
    reply.tool_calls[0]["args"]["what"][0] = number
    assert sampled.edited() == wire_message(reply)
    assert log.add_prompt([hi, reply, hi], "a:1").extends is None
    assert log.messages[1] == before


def test_values_that_cannot_be_compared_are_no_error() -> None:
    result = ToolMessage("so", tool_call_id="a", artifact=numpy.zeros(2))
    reply = AIMessage("", tool_calls=[{**CALL, "args": {"what": numpy.zeros(2)}}])
    log = MessageLog()
    first = log.add_prompt([result, reply], "a:1")
    result.artifact = numpy.ones(2)
    assert log.add_prompt([result, reply], "a:1").new == first.new
    reply.tool_calls[0]["args"]["what"] = numpy.zeros(2)
    assert len(log.add_prompt([result, reply], "a:1").new) == 2


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


class NoText:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_what_has_no_text_and_no_form_in_json_is_written_all_the_same() -> None:
    odd, named, *rest = jsonable([NoText(), {NoText(): 1}, b"\xff", 10**2000])
    assert "NoText object at" in odd and "NoText object at" in next(iter(named))
    assert json.loads(json.dumps(rest)) == ["b'\\xff'", 10**2000]
