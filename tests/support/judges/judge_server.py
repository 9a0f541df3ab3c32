"""A hosted model's place: OpenAI's API on loopback, where the literal judge answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tests.support.json_server import JsonServer, Refusal
from tests.support.judges.literal_judge import literal


class JudgeServer(JsonServer):
    """Keeps the bodies that it was sent in `seen`; refuses as `refusals` say before it answers."""

    def __init__(self, refusals: Sequence[Refusal] = ()) -> None:
        super().__init__()
        self._refusals = list(refusals)
        self.times: list[float] = []

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def seen(self) -> list[dict[str, Any]]:
        return [body for _, body in self.requests]

    def answer(self, path: str, body: Any) -> Any:
        self.times.append(time.monotonic())
        if self._refusals:
            raise self._refusals.pop(0)
        message = {"role": "assistant", "content": literal(body["messages"][1]["content"])}
        return {
            "id": "j",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100},
        }
