"""Answers as JSON, made once for all that ask for the same at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from pydantic import BaseModel
from starlette.responses import Response


async def as_json(value: BaseModel) -> Response:
    """A value as JSON, which the event loop does not wait for: it may have megabytes."""
    return _response(await asyncio.to_thread(value.model_dump_json))


class SharedAnswers:
    """Answers shared by all viewers: when something happens, each is read and written once."""

    def __init__(self) -> None:
        self._asked: dict[str, _Answer] = {}

    async def get(self, what: str, read: Callable[[], Awaitable[BaseModel]]) -> Response:
        """The answer to `what`, of a `read` that began after this was asked."""
        asked = time.monotonic()
        answer = self._asked.setdefault(what, _Answer())
        answer.users += 1
        try:
            async with answer.lock:
                if answer.begun < asked:
                    begun = time.monotonic()
                    answer.body = await asyncio.to_thread((await read()).model_dump_json)
                    answer.begun = begun
                return _response(answer.body)
        finally:
            answer.users -= 1
            if not answer.users:
                del self._asked[what]


class _Answer:
    def __init__(self) -> None:
        self.lock, self.users = asyncio.Lock(), 0
        self.begun, self.body = float("-inf"), ""


def _response(body: str) -> Response:
    return Response(body, media_type="application/json")
