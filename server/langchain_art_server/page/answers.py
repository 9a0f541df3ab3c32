"""Answers as JSON, made once for all that ask for the same at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from pydantic_core import to_json
from starlette.responses import Response


async def as_json(value: object) -> Response:
    """A value as JSON, which the event loop does not wait for: it may have megabytes."""
    return _response(await asyncio.to_thread(_written, value))


class SharedAnswers:
    """Answers shared by all viewers: when something happens, each is read and written once."""

    def __init__(self) -> None:
        self._asked: dict[str, _Answer] = {}

    async def get(self, what: str, read: Callable[[], Awaitable[object]]) -> Response:
        """The answer to `what`, of a `read` that began after this was asked."""
        asked = time.monotonic()
        answer = self._asked.setdefault(what, _Answer())
        answer.users += 1
        try:
            async with answer.lock:
                if answer.begun < asked:
                    begun = time.monotonic()
                    answer.body = await asyncio.to_thread(_written, await read())
                    answer.begun = begun
                return _response(answer.body)
        finally:
            answer.users -= 1
            if not answer.users:
                del self._asked[what]


class _Answer:
    def __init__(self) -> None:
        self.lock, self.users = asyncio.Lock(), 0
        self.begun, self.body = float("-inf"), b""


def _written(value: object) -> bytes:
    return to_json(value, inf_nan_mode="null")


def _response(body: bytes) -> Response:
    return Response(body, media_type="application/json")
