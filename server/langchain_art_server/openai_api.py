"""/v1/chat/completions: OpenAI's dialect in and out, tags, call records.

A reply's last byte leaves after its `CallRecord` is on disk. Format: OpenAI's API reference, "Chat
completions" and "Streaming events".
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from langchain_art.errors import (
    ArtError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    RequestRefused,
)
from langchain_art_server.adapters import Target
from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest
from langchain_art_server.chat_request import ChatBody, parse
from langchain_art_server.service import Service
from langchain_art_server.tables import CallRecord


async def chat_completions(request: Request, raw: Any) -> Response:
    """The route. `raw` is the parsed body."""
    service: Service = request.app.state.service
    body = parse(raw, request.headers)
    limit = service.settings.max_running_calls
    if service.running_calls + (body.n or 1) > limit:
        raise Overloaded(
            f"{service.running_calls} calls are running, and {limit} may. Retry, or lower the "
            "client's concurrency.",
            retry_after=1,
        )
    completion = _Completion(service, body)
    if body.stream:
        return await completion.stream()
    return Response(to_json(await completion.whole()), media_type="application/json")


class _Completion:
    """One request on its way: resolve the name, sample, record, answer."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self._service, self._body = service, body
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = time.time()

    def _call_id(self, index: int) -> str:
        return self._id if index == 0 else f"{self._id}:{index}"

    def _request(self, target: Target, index: int, stream: bool) -> ChatRequest:
        sampling = self._body.sampling()
        if sampling.seed is not None and index:
            sampling = replace(sampling, seed=sampling.seed + index)
        return ChatRequest(
            id=self._call_id(index),
            messages=self._body.messages,
            tools=self._body.tools or [],
            tool_choice=self._body.tool_choice or "auto",
            parallel_tool_calls=self._body.parallel_tool_calls is not False,
            response_format=self._body.response_format,
            adapter=target.adapter,
            sampling=sampling,
            stream=stream,
        )

    def _record(self, target: Target, index: int, reply: ChatReply) -> CallRecord:
        asked = self._body.model_dump(
            mode="json", exclude={"art", "model", "stream", "stream_options"}, exclude_none=True
        )
        return CallRecord(
            id=self._call_id(index),
            created_at=time.time(),
            policy=target.policy,
            version=target.version,
            model=target.model,
            tags=self._body.art,
            request=asked,
            reply=_message(reply),
            prompt_token_ids=reply.prompt_token_ids,
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            temperature=self._body.sampling().temperature or 1.0,
            finish_reason=reply.finish_reason,
            untrainable=reply.untrainable,
            latency=time.time() - self._created,
        )

    async def _one(self, target: Target, index: int) -> ChatReply:
        async for piece in self._service.sampler.chat(self._request(target, index, stream=False)):
            if isinstance(piece, ChatReply):
                return piece
        raise EngineUnavailable("The sampler gave no reply.", retry_after=1)

    async def whole(self) -> dict[str, Any]:
        """Sample, record, and the reply as one object."""
        count = self._body.n or 1
        self._service.running_calls += count
        try:
            async with self._service.router.use(self._body.model) as target:
                if count == 1:
                    replies = [await self._one(target, 0)]
                else:
                    replies = list(
                        await asyncio.gather(*(self._one(target, i) for i in range(count)))
                    )
        finally:
            self._service.running_calls -= count
        records = [self._record(target, i, reply) for i, reply in enumerate(replies)]
        await self._service.store.add_calls(records)
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": int(self._created),
            "model": target.model,
            "choices": [
                {
                    "index": index,
                    "message": _message(reply),
                    "finish_reason": reply.finish_reason,
                    "logprobs": self._logprobs(reply),
                }
                for index, reply in enumerate(replies)
            ],
            "usage": _usage(replies),
        }

    def _logprobs(self, reply: ChatReply) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content: list[dict[str, Any]] = []
        for index, text in enumerate(reply.token_texts):
            top = reply.top_logprobs[index] if reply.top_logprobs else []
            content.append(
                {
                    "token": text,
                    "logprob": reply.logprobs[index],
                    "bytes": list(text.encode()),
                    "top_logprobs": [
                        {"token": other, "logprob": value, "bytes": list(other.encode())}
                        for _, value, other in top
                    ],
                }
            )
        return {"content": content, "refusal": None}

    async def stream(self) -> Response:
        """Server-sent events. What can be refused is refused before the first byte."""
        if (self._body.n or 1) > 1:
            raise InvalidRequest("got stream=true with n > 1, expected n = 1", param="n")
        stack = AsyncExitStack()
        target = await stack.enter_async_context(self._service.router.use(self._body.model))
        self._service.running_calls += 1
        pieces = self._service.sampler.chat(self._request(target, 0, stream=True))
        try:
            first = await anext(aiter(pieces))
        except BaseException:
            self._service.running_calls -= 1
            await stack.aclose()
            raise

        async def events() -> AsyncIterator[bytes]:
            try:
                async for event in self._events(target, first, pieces):
                    yield event
            finally:
                self._service.running_calls -= 1
                await stack.aclose()

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _events(
        self,
        target: Target,
        first: ChatDelta | ChatReply,
        pieces: AsyncIterator[ChatDelta | ChatReply],
    ) -> AsyncIterator[bytes]:
        yield self._chunk(target, {"role": "assistant", "content": ""})
        said_tools = 0
        piece: ChatDelta | ChatReply = first
        try:
            while isinstance(piece, ChatDelta):
                if piece.content:
                    yield self._chunk(target, {"content": piece.content})
                if piece.tool_calls:
                    numbered = [
                        {"index": said_tools + i, **call} for i, call in enumerate(piece.tool_calls)
                    ]
                    said_tools += len(numbered)
                    yield self._chunk(target, {"tool_calls": numbered})
                piece = await anext(pieces)
            await self._service.store.add_calls([self._record(target, 0, piece)])
        except ArtError as error:
            refusal = error if isinstance(error, RequestRefused) else EngineUnavailable(str(error))
            yield _sse(to_json(refusal.body()))
            return
        yield self._chunk(target, {}, piece.finish_reason, self._logprobs(piece))
        if self._body.stream_options and self._body.stream_options.include_usage:
            usage = self._frame(target) | {"choices": [], "usage": _usage([piece])}
            yield _sse(to_json(usage))
        yield _sse(b"[DONE]")

    def _frame(self, target: Target) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": int(self._created),
            "model": target.model,
        }

    def _chunk(
        self,
        target: Target,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return _sse(to_json(self._frame(target) | {"choices": [choice]}))


def _sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _message(reply: ChatReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        message["tool_calls"] = reply.tool_calls
    return message


def _usage(replies: list[ChatReply]) -> dict[str, int]:
    prompt = len(replies[0].prompt_token_ids)
    said = sum(len(reply.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
