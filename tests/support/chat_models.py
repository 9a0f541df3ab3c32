"""A `ChatART` for a test server, and the record that the server kept of its answer."""

from typing import Any

import httpx
from langchain_core.messages import AIMessage

from langchain_art import ChatART


def model_of(server: Any, policy: str | None = None, **kwargs: Any) -> ChatART:
    options = {"model": policy or server.policy, "max_tokens": 8, **kwargs}
    return ChatART(base_url=server.base_url, api_key=server.api_key or "EMPTY", **options)


def recorded(server: Any, message: AIMessage) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {server.api_key or 'EMPTY'}"}
    call_id = message.response_metadata["call_id"]
    reply = httpx.get(f"{server.base_url}/calls/{call_id}", headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()
