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


def service(**parts: Any) -> Any:
    """What calls ask of a server: one with space, whose sampler is told or only says its size."""
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


@pytest.mark.parametrize("path", [CHAT, f"{MESSAGES}/count_tokens"])
async def test_tokens_are_counted_where_there_is_no_space_for_a_record(path: str) -> None:
    def refuse() -> None:
        raise EngineUnavailable("The disk is full.")

    expected = (EngineUnavailable, "disk") if path == CHAT else (InvalidRequest, "model")
    with pytest.raises(expected[0], match=expected[1]):
        await ask(service(health=SimpleNamespace(require_space=refuse)), {}, path)
