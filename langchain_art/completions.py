"""The SDK's chat completions without its models: a reply stays the JSON that it is.

LangChain turns a reply into messages itself. The SDK before it checks every field of the request
against its types and builds typed objects from the reply, which costs as much CPU as all the rest
of a call; both are left out here. Connections, retries, timeouts and errors stay the SDK's.
"""

from __future__ import annotations

from typing import Any

import openai

from langchain_art.event_loops import Response

_PATH = "/chat/completions"


class _Reply:
    """What LangChain asks of the SDK's raw response."""

    def __init__(self, response: Any) -> None:
        self.http_response = response
        self.headers = response.headers

    def parse(self) -> dict[str, Any]:
        """The reply, as JSON gave it."""
        return self.http_response.json()


def _arguments(payload: dict[str, Any]) -> dict[str, Any]:
    """The SDK's `post` arguments for the arguments of its `create`."""
    body = dict(payload)
    options: dict[str, Any] = {}
    for name, option in (("extra_headers", "headers"), ("extra_query", "params")):
        if (value := body.pop(name, None)) is not None:
            options[option] = value
    if "timeout" in body:
        options["timeout"] = body.pop("timeout")
    body |= body.pop("extra_body", None) or {}
    return {"body": body, "options": options, "cast_to": Response}


class Completions:
    """Stands where LangChain expects ``client.chat.completions``."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client
        self.with_raw_response = _Raw(client)

    def create(self, **payload: Any) -> Any:
        """The SDK's own: LangChain streams through it."""
        return self._client.chat.completions.create(**payload)


class _Raw:
    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client

    def create(self, **payload: Any) -> Any:
        if payload.get("stream"):
            return self._client.chat.completions.with_raw_response.create(**payload)
        return _Reply(self._client.post(_PATH, **_arguments(payload)))


class AsyncCompletions:
    """Stands where LangChain expects the asynchronous ``client.chat.completions``."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self.with_raw_response = _AsyncRaw(client)

    async def create(self, **payload: Any) -> Any:
        """The SDK's own: LangChain streams through it."""
        return await self._client.chat.completions.create(**payload)


class _AsyncRaw:
    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client

    async def create(self, **payload: Any) -> Any:
        if payload.get("stream"):
            return await self._client.chat.completions.with_raw_response.create(**payload)
        return _Reply(await self._client.post(_PATH, **_arguments(payload)))
