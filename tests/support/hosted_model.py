"""A hosted model's place: OpenAI's API on loopback, where a function of the messages answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_openai import ChatOpenAI

from tests.support.json_server import JsonServer


class HostedModel(JsonServer):
    """Answers with what `reply` makes of a request's messages; `chat` is a client of it."""

    def __init__(self, reply: Callable[[list[dict[str, Any]]], str]) -> None:
        super().__init__()
        self._reply = reply

    @property
    def chat(self) -> ChatOpenAI:
        return ChatOpenAI(model="hosted", base_url=f"{self.url}/v1", api_key="none", max_retries=0)  # type: ignore[arg-type]

    def answer(self, path: str, body: Any) -> Any:
        message = {"role": "assistant", "content": self._reply(body["messages"])}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
        }
