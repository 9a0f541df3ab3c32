"""A chat request is bounded by what an engine can take, before an engine has it."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.errors import InvalidRequest, Overloaded, PromptTooLong
from langchain_art.wire import KeyLimits
from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest
from langchain_art_server.gateway.auth import CHAT
from langchain_art_server.gateway.chat.completion_format import ChatDialect, logprobs
from langchain_art_server.gateway.chat.completions import ModelCalls
from langchain_art_server.gateway.chat.dialect import BEGIN, END, Thoughts, split
from langchain_art_server.gateway.chat.request import ChatBody, CheckedChatRequest, refuse_oversize
from langchain_art_server.gateway.limits import CallSlots, Meter
from langchain_art_server.gateway.refusals import answer
from langchain_art_server.policies.router import RoutedModel

SAY = [{"role": "user", "content": "When?"}]


def checked(**options: Any) -> CheckedChatRequest:
    return CheckedChatRequest({"model": "m", "messages": SAY} | options)


HUGE = 10**5000
FAR = {"a": [{"b": float("inf")}]}


@pytest.mark.parametrize(
    ("name", "most", "beyond"),
    [
        ("top_k", 2**31 - 1, 2**31),
        ("seed", 2**63 - 1, 2**63),
        ("seed", -(2**63), -(2**63) - 1),
        ("max_tokens", 2**31 - 1, 2**31),
        ("stop", ["x" * 1024] * 16, ["x"] * 17),
        ("stop", "x" * 1024, "x" * 1025),
        ("stop", ["x"], ["x" * 1025]),
        ("n", 16, 17),
        ("top_p", 1.0, 1.5),
        ("messages", SAY, SAY * 4097),
        # Values that would be long in a message.
        ("max_completion_tokens", 10, HUGE),
        ("temperature", 1.0, HUGE),
        ("tool_choice", "none", "z" * 1_000_000),
        ("messages", SAY, [{"role": HUGE}]),
        ("messages", SAY, [{"role": "user", "content": "x", "audio": HUGE}]),
        ("messages", SAY, [{"role": "assistant", "content": "x", "tool_calls": [FAR]}]),
        ("tools", [], [{"type": "function", "function": {"name": HUGE}}]),
        ("tools", [], [{"type": "function", "function": {"name": "f", "parameters": [1]}}]),
        ("tools", [], [{"type": "function", "function": {"name": "f", "parameters": FAR}}]),
        ("response_format", None, {"type": "json_schema", "json_schema": {"schema": FAR}}),
    ],
    ids=lambda value: str(value)[:16] if isinstance(value, str) else "",
)
def test_what_no_engine_can_take_is_refused_by_name(name: str, most: Any, beyond: Any) -> None:
    assert checked(**{name: most}).record.get(name) in (most, None)
    with pytest.raises(InvalidRequest) as refused:
        checked(**{name: beyond})
    assert refused.value.param == name
    assert len(answer(refused.value, CHAT).body) < 2000
    field = ChatBody.model_json_schema()["properties"][name]
    if isinstance(most, int) and most > 99:  # and the document says so
        assert str(abs(most)) in str(field)


def test_messages_and_tools_that_cannot_fit_are_refused_before_they_are_shown() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 500}}
    fits = ChatBody(model="m", messages=SAY, tools=[tool])
    refuse_oversize(fits, 1000)
    with pytest.raises(PromptTooLong, match="more than 400 characters"):
        refuse_oversize(fits, 400)
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": list(range(300_000))}}}
    with pytest.raises(InvalidRequest, match="a schema of more than 262144 characters"):
        refuse_oversize(fits.model_copy(update={"response_format": schema}), 1000)
    parts = [{"type": "text", "text": ""}] * 400  # no text at all, and 400 values
    many = ChatBody(model="m", messages=[{"role": "user", "content": parts}])
    with pytest.raises(PromptTooLong):
        refuse_oversize(many, 800)


def service(**parts: Any) -> Any:
    """A server with space, whose sampler is asked or only says its size."""
    usual: dict[str, Any] = {
        "health": SimpleNamespace(require_space=lambda: None),
        "sampler": SimpleNamespace(info=SimpleNamespace(max_prompt_chars=1 << 20)),
        "no_images": "",
        "store": SimpleNamespace(call=None),
    }
    return SimpleNamespace(**usual | parts)


async def ask(of: Any, asked: dict[str, Any], path: str = CHAT, **scope: Any) -> None:
    """Send a request whose answer nobody takes."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(asked).encode()}

    scope = {"type": "http", "method": "POST", "path": path, "headers": []} | scope
    await ModelCalls(of)(scope, receive, cast(Any, None))


def test_others_have_turns_between_the_parts_of_reading_a_large_request() -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(40_000)}
    asked = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object", "properties": properties}},
        },
    }
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def run() -> None:
        task = asyncio.create_task(other())
        with pytest.raises(InvalidRequest, match="schema"):
            await ask(service(), asked)
        task.cancel()

    asyncio.run(run())
    assert turns >= 1, "one between parsing and checking, one before its texts are measured"


class Failing:
    """Fails the last of three choices; the others are sampled for ever."""

    info = SimpleNamespace(max_prompt_chars=1 << 20)

    def __init__(self) -> None:
        self.running = 0

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatReply, None]:
        self.running += 1
        try:
            if request.id.endswith(":2"):
                await asyncio.sleep(0)
                raise InvalidRequest("The schema allows no reply.")
            await asyncio.Event().wait()
            yield cast(ChatReply, None)
        finally:
            self.running -= 1


@asynccontextmanager
async def _open(target: object = None) -> AsyncIterator[Any]:
    yield target


async def ask_for_three(sampler: Failing, slots: CallSlots, meter: Meter) -> None:
    async def begin_call(_run: str | None) -> tuple[int, tuple[()]]:
        return 1, ()

    of = service(
        sampler=sampler,
        slots=slots,
        jobs=SimpleNamespace(gate=SimpleNamespace(through=lambda _count: _open())),
        router=SimpleNamespace(use=lambda model: _open(RoutedModel(None, None, None, model))),
        begin_call=begin_call,
        metrics=SimpleNamespace(calls_of=lambda *_: None),
        tenant="default",
    )
    said = [{"role": "user", "content": "x"}]
    access = SimpleNamespace(meter=meter, client="t/key")
    await ask(of, {"model": "m", "messages": said, "n": 3}, **{"art.access": access})


async def test_where_one_choice_fails_the_others_are_sampled_no_further() -> None:
    sampler, slots = Failing(), CallSlots(4)
    with pytest.raises(InvalidRequest, match="allows no reply"):
        await ask_for_three(sampler, slots, Meter(KeyLimits(calls_per_minute=9)))
    assert (sampler.running, slots.running) == (0, 0)


async def test_a_call_that_finds_no_slot_is_none_of_a_minutes() -> None:
    slots, meter = CallSlots(4), Meter(KeyLimits(calls_per_minute=9, concurrent_calls=4))
    with slots.take("other", 2), pytest.raises(Overloaded):
        await ask_for_three(Failing(), slots, meter)
    left = {name: left for name, _, left in meter.state(0)}
    assert left == {"calls_per_minute": 9.0, "concurrent_calls": 4}


async def test_an_event_is_one_line_whatever_the_model_says() -> None:
    characters = map(chr, range(sys.maxunicode + 1))
    ends = "".join(one for one in characters if len(f"a{one}b".splitlines()) > 1)
    said = f"höher{ends}, 文 \\u2028"
    function = {"name": said, "arguments": json.dumps({"a": said}, ensure_ascii=False)}
    call = {"id": "c", "type": "function", "function": function}
    reply = ChatReply([1], [2], [-0.5], said, [call], "stop", token_texts=[said])
    messages = [{"role": "user", "content": "a"}]
    chat = ChatDialect({"model": "m", "messages": messages, "logprobs": True, "stream": True})
    chat.begin({"id": "i", "created": 1, "model": "m"}, CheckedChatRequest(chat.body))
    written = [chat.delta(0, ChatDelta(said, [call])), await chat.end(0, reply)]
    lines = [line for line in httpx.Response(200, content=b"".join(written)).iter_lines() if line]
    first, last = (json.loads(line.removeprefix("data: "))["choices"][0] for line in lines)
    assert first["delta"] == {"content": said, "tool_calls": [{"index": 0, **call}], "id": "i"}
    assert [one["token"] for one in last["logprobs"]["content"]] == [said]


async def test_the_bytes_of_a_part_of_a_character_are_not_those_of_a_question_mark() -> None:
    texts, top = ["é", "\ufffd"], [[(2, -0.5, "é")], [(3, -0.5, "\ufffd\ufffd")]]
    reply = ChatReply([1], [2, 3], [-0.5] * 2, "é", [], "stop", None, top, token_texts=texts)
    whole, part = json.loads(await logprobs(reply))["content"]
    assert (whole["bytes"], whole["top_logprobs"][0]["bytes"]) == ([0xC3, 0xA9], [0xC3, 0xA9])
    assert part["token"] == "\ufffd" and part["bytes"] is part["top_logprobs"][0]["bytes"] is None


PARTS = st.sampled_from([BEGIN, END, "<think", "</thin", "<", "k>", "a", " b\n", "</think"])


@given(st.lists(PARTS, max_size=8).map("".join), st.lists(st.integers(1, 6), max_size=60))
def test_pieces_are_what_the_whole_is(reply: str, sizes: list[int]) -> None:
    thoughts, pieces, at = Thoughts(), list[tuple[str, str]](), 0
    for size in [*sizes, len(reply)]:
        pieces += thoughts.feed(reply[at : at + size])
        at += size
    pieces += thoughts.rest()
    kinds = [kind for kind, _ in pieces]
    assert kinds == sorted(kinds, reverse=True)  # what was thought, and then the text
    thought, text = split(reply)
    assert "".join(t for kind, t in pieces if kind == "text") == text
    assert (thought is None) == ("thought" not in kinds)
    assert "".join(t for kind, t in pieces if kind == "thought") == (thought or "")
    if thought is None:
        assert text == reply
    elif END in reply[len(BEGIN) :]:
        assert f"{BEGIN}{thought}{END}{text}" == reply
    else:
        assert (BEGIN + thought, text) == (reply, "")
