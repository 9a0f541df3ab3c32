"""Requests' bodies as values, and their limits: of each, of all, of the time for one client's."""

from __future__ import annotations

import asyncio
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Message, Receive

from langchain_art import wire
from langchain_art.errors import BodyTooLarge, EngineUnavailable, InvalidRequest, PromptTooLong
from langchain_art_server.gateway.chat.request import parse_json, refuse_overflow
from langchain_art_server.gateway.refusals import refuse

M = TypeVar("M", bound=BaseModel)

#: The largest bodies that may be in memory, unfinished, at once.
_LARGEST_AT_ONCE = 2

#: Bytes of a body from which on it is large, and of one client's large bodies that are taken in a
#: second: to parse and to check 30 MB takes the event loop a second, so they get a quarter of it.
_LARGE, _TAKEN_PER_SECOND = 64 << 10, 8 << 20
#: Bytes of a chat request beyond those of its prompt: a schema, the fields' names; and for each
#: token of the context, as JSON.
_CHAT_BYTES, _TOKEN_BYTES = 1 << 20, 16


async def model_of(request: Request, kind: type[M]) -> M:
    """The body as a wire model. FastAPI's own parser would accept NaN. Raises InvalidRequest."""
    raw = parse_json(await request.body())
    if isinstance(raw, dict):
        refuse_overflow(raw)
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise refuse(error.errors(), kind) from error


def checked_key(key: str | None, most: int) -> str:
    """A request's Idempotency-Key of at most so many characters. Raises InvalidRequest."""
    if not key or not wire.ID.fullmatch(key) or len(key) > most:
        raise InvalidRequest(
            f"got Idempotency-Key {key!r}, expected 1-{most} characters from A-Z a-z 0-9 . _ : @ "
            "+ = - that begin with a letter or a digit; the same key never trains twice",
            param="Idempotency-Key",
        )
    return key


class RequestBodies:
    """The bodies that are being received, each of at most `limit` bytes.

    The tokens of the model's `context` bound a chat request: parsing one occupies the event loop.
    """

    def __init__(self, limit: int, context: int | None = None) -> None:
        self._limit, self._budget = limit, limit * _LARGEST_AT_ONCE
        self._context = context
        chat = limit if context is None else _CHAT_BYTES + _TOKEN_BYTES * context
        self._chat_limit = min(limit, chat)
        self._held = 0
        #: By client: when the next large body is taken from it.
        self._free_at: dict[str, float] = {}
        self._unfinished: set[RequestBody] = set()

    def admit(
        self, headers: dict[bytes, bytes], receive: Receive, client: str, *, chat: bool = False
    ) -> RequestBody:
        """The body of a client's new request, as a context.

        Raises BodyTooLarge, or PromptTooLong, by its Content-Length.
        """
        length = headers.get(b"content-length", b"0")
        body = RequestBody(self, receive, client, self._chat_limit if chat else self._limit)
        body.check(int(length) if length.isdigit() and len(length) < 20 else 0)
        return body

    def too_large(self, length: int, most: int) -> BodyTooLarge | PromptTooLong:
        """The refusal of a body of `length` bytes, of which `most` were allowed."""
        got = f"got a body of {length} bytes or more, expected at most {most}."
        if most < self._limit:
            return PromptTooLong(
                f"The prompt is too long: {got} The model's context has {self._context} tokens. "
                "Shorten the messages, or serve with a larger max_model_len."
            )
        return BodyTooLarge(
            f"{got} Send fewer trajectories at a time, or raise max_body_bytes on the server."
        )

    async def turn(self, client: str, size: int) -> None:
        """Wait until a large body of so many bytes is taken from a client."""
        now = asyncio.get_running_loop().time()
        self._free_at = {one: at for one, at in self._free_at.items() if at > now}
        begin = self._free_at.get(client, now)
        self._free_at[client] = begin + size / _TAKEN_PER_SECOND
        await asyncio.sleep(begin - now)

    def hold(self, body: RequestBody, more: int) -> None:
        """Count bytes of an unfinished body. Beyond the budget, the largest loses its request."""
        self._unfinished.add(body)
        self._held += more
        if self._held > self._budget:
            max(self._unfinished, key=lambda one: one.held).drop()

    def let_go(self, body: RequestBody) -> None:
        """A body has come whole, or its request has ended."""
        self._held -= body.held
        self._unfinished.discard(body)


class RequestBody:
    """One request's body; `receive` is ASGI's, and `held` the bytes of an unfinished body."""

    __slots__ = ("_all", "_client", "_dropped", "_most", "_receive", "_seen", "_task", "held")

    def __init__(self, bodies: RequestBodies, receive: Receive, client: str, most: int) -> None:
        self._all, self._receive, self._client, self._most = bodies, receive, client, most
        self._seen = self.held = 0
        self._dropped = False
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._release()

    async def receive(self) -> Message:
        """ASGI's `receive`. Raises as `check`, and EngineUnavailable if bodies take too much."""
        try:
            message = await self._receive()
            last = not message.get("more_body")
            self._seen += (more := len(message.get("body", b"")))
            self.check(self._seen)
            large = self._seen > _LARGE and message["type"] == "http.request"
            if more and (large or not last):
                self._task = asyncio.current_task()
                self.held += more
                self._all.hold(self, more)
                if self._dropped:
                    raise self._refusal()
            if last and large:
                await self._all.turn(self._client, self._seen)
        except asyncio.CancelledError:
            if self._dropped:
                raise self._refusal() from None
            raise
        if last:
            self._release()
        return message

    def check(self, length: int) -> None:
        """Raises BodyTooLarge, or PromptTooLong."""
        if length > self._most:
            raise self._all.too_large(length, self._most)

    def drop(self) -> None:
        """Refuse the request, which waits for the rest of its body."""
        self._dropped = True
        self._release()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def _refusal(self) -> Exception:
        if self._task is not None:
            self._task.uncancel()
        return EngineUnavailable(
            "The bodies of unfinished requests take too much of the server's memory, and this is "
            "the largest. Send it again, in smaller parts if that is possible.",
            retry_after=5,
        )

    def _release(self) -> None:
        if self.held:
            self._all.let_go(self)
            self.held = 0
