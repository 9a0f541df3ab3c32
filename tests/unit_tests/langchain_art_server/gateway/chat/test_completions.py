import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from langchain_art.errors import EngineUnavailable, InvalidRequest, Overloaded
from langchain_art.wire import KeyLimits
from langchain_art_server.backends.base import ChatReply, ChatRequest
from langchain_art_server.gateway.auth import CHAT, MESSAGES
from langchain_art_server.gateway.chat.completions import ModelCalls
from langchain_art_server.gateway.limits import CallSlots, Meter
from langchain_art_server.policies.router import RoutedModel


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
    info = SimpleNamespace(max_prompt_chars=1 << 20)
    service = SimpleNamespace(
        health=SimpleNamespace(require_space=lambda: None),
        sampler=SimpleNamespace(info=info),
        no_images="",
        store=SimpleNamespace(call=None),
    )
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(asked).encode()}

    async def run() -> None:
        task = asyncio.create_task(other())
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
        with pytest.raises(InvalidRequest, match="schema"):
            await ModelCalls(cast(Any, service))(scope, receive, cast(Any, None))
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

    service = SimpleNamespace(
        health=SimpleNamespace(require_space=lambda: None),
        sampler=sampler,
        no_images="",
        store=SimpleNamespace(call=None),
        slots=slots,
        jobs=SimpleNamespace(gate=SimpleNamespace(through=lambda _count: _open())),
        router=SimpleNamespace(use=lambda model: _open(RoutedModel(None, None, None, model))),
        begin_call=begin_call,
        metrics=SimpleNamespace(calls_of=lambda *_: None),
        tenant="default",
    )
    said = [{"role": "user", "content": "x"}]
    body = json.dumps({"model": "m", "messages": said, "n": 3}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    access = SimpleNamespace(meter=meter, client="t/key")
    scope = {"type": "http", "path": CHAT, "headers": [], "art.access": access}
    await ModelCalls(cast(Any, service))(scope, receive, cast(Any, None))


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


@pytest.mark.parametrize("path", [CHAT, f"{MESSAGES}/count_tokens"])
async def test_tokens_are_counted_where_there_is_no_space_for_a_record(path: str) -> None:
    def refuse() -> None:
        raise EngineUnavailable("The disk is full.")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    service = SimpleNamespace(health=SimpleNamespace(require_space=refuse))
    scope = {"type": "http", "path": path, "headers": []}
    expected = (EngineUnavailable, "disk") if path == CHAT else (InvalidRequest, "model")
    with pytest.raises(expected[0], match=expected[1]):
        await ModelCalls(cast(Any, service))(scope, receive, cast(Any, None))
