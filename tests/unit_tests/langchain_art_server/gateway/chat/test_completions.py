"""Others' turns of the event loop while one request is read."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from langchain_art.errors import InvalidRequest
from langchain_art_server.gateway.auth import CHAT
from langchain_art_server.gateway.chat.completions import ModelCalls


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
