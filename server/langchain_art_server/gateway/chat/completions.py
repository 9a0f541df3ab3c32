"""The routes of model calls (`DIALECTS`): each samples, records and answers.

A choice's last byte is sent after its `CallRecord` is on disk.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import Any, Self

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from langchain_art.errors import ArtError, EngineUnavailable, RequestRefused
from langchain_art_server.backends.base import (
    MAX_SCHEMA_CHARS,
    ChatDelta,
    ChatReply,
    ChatRequest,
    EarlierCall,
)
from langchain_art_server.gateway.auth import CHAT, MESSAGES, RESPONSES, access_of, peer_of
from langchain_art_server.gateway.chat.anthropic_messages import MessagesDialect, TokenCount
from langchain_art_server.gateway.chat.completion_format import ChatDialect, message
from langchain_art_server.gateway.chat.dialect import Dialect
from langchain_art_server.gateway.chat.openai_responses import ResponsesDialect
from langchain_art_server.gateway.chat.request import (
    CheckedChatRequest,
    parse_json,
    refuse_oversize,
)
from langchain_art_server.gateway.limits import Lease, Meter
from langchain_art_server.gateway.service import Service
from langchain_art_server.policies.router import RoutedModel
from langchain_art_server.storage.tables import CallRecord
from langchain_art_server.telemetry.log_context import CURRENT, LogContext

_LISTEN_AFTER = 0.5  # seconds
_UNLIMITED = nullcontext()
#: No proxy keeps the events of a stream back.
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
#: Bytes of a body from which on to parse it, to check it and to measure its texts take milliseconds
#: each.
_LARGE = 64 << 10
#: A choice's index, and a part of its reply.
IndexedPiece = tuple[int, ChatDelta | ChatReply]
#: The routes, and what their requests and answers are like.
DIALECTS: dict[str, Callable[[Any], Dialect]] = {
    CHAT: ChatDialect,
    RESPONSES: ResponsesDialect,
    MESSAGES: MessagesDialect,
    f"{MESSAGES}/count_tokens": TokenCount,
}


class ModelCalls:
    """The routes, as an ASGI endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises RequestRefused before anything is sent."""
        service, dialect = self._service, DIALECTS[scope["path"]]
        if dialect is not TokenCount:
            service.health.require_space()  # for the call's record
        sent = await _body(receive)
        raw, size = parse_json(sent), len(sent)
        if size > _LARGE:  # other requests have turns of the event loop in between
            await asyncio.sleep(0)
        form = dialect(raw)
        await form.refer(service.store.call)
        info = service.sampler.info
        call = CheckedChatRequest(
            form.body, scope["headers"], run=scope.get("art.run"), no_images=service.no_images
        )
        most = info.max_prompt_chars
        # The texts of a body are no longer than the body.
        if size > min(most, MAX_SCHEMA_CHARS):
            await asyncio.sleep(0)
            refuse_oversize(call.body, most)
        access = access_of(scope)
        meter = access.meter if access is not None else None
        with (
            service.slots.take(peer := peer_of(scope), call.count) as slots,
            meter.begin(call.count) if meter is not None else _UNLIMITED,
        ):
            async with (
                _WhileConnected(receive) as client,
                service.jobs.gate.through(call.count),
                service.router.use(call.body.model) as target,
            ):
                began, earlier = await service.begin_call(call.body.art.trajectory_id)
                completion = _Completion(
                    service, form, call, target, slots, peer, meter, began=began, earlier=earlier
                )
                if call.body.stream:
                    return await completion.stream(scope, receive, send, client.stop)
                answer = await completion.whole()
        length = b"%d" % len(answer)
        headers = [(b"content-length", length), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


async def _body(receive: Receive) -> bytes:
    """A request's body, in a third of the time that Starlette's takes. Raises ClientDisconnect."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


class _WhileConnected:
    """A context that is cancelled when its client disconnects, so that sampling ends.

    Listening costs a task, so it begins only after `_LISTEN_AFTER`. `stop` ends it, for a caller
    that listens itself from then on. Leaving the context raises ClientDisconnect in place of the
    cancellation. (A class: `asynccontextmanager` would cost each call a hundredth more.)
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._listener: asyncio.Task[None] | None = None
        self._limit = asyncio.timeout(None)
        self._timer = asyncio.get_running_loop().call_later(_LISTEN_AFTER, self._begin)

    def _begin(self) -> None:
        self._listener = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._limit.reschedule(asyncio.get_running_loop().time())

    def stop(self) -> None:
        self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        self.stop()
        try:
            await self._limit.__aexit__(*raised)
        except TimeoutError as expired:
            raise ClientDisconnect from expired


class _Completion:
    """One request: sample, record, answer."""

    def __init__(
        self,
        service: Service,
        form: Dialect,
        call: CheckedChatRequest,
        target: RoutedModel,
        slots: Lease,
        client: str,
        meter: Meter | None,
        *,
        began: int,
        earlier: Sequence[EarlierCall],
    ) -> None:
        self._service, self._call, self._target, self._slots = service, call, target, slots
        self._form, self._client, self._meter = form, client, meter
        self._began, self._start, self._earlier = began, time.monotonic(), earlier
        made = time.time()
        # Ids that grow with time are adjacent in the table's index: a batch writes few pages.
        self._id = f"{form.prefix}{int(made * 1e6):014x}{random.getrandbits(72):018x}"
        self._frame = {"id": self._id, "created": int(made), "model": target.model}
        named, self._run = target.policy or target.model, call.body.art.trajectory_id
        self._series = service.metrics.calls_of(service.tenant, named)
        self._context = context = CURRENT.get() or LogContext()
        context.policy, context.call_id, context.run_id = named, self._id, self._run
        context.model = target.model

    def _call_id(self, index: int) -> str:
        return self._id if index == 0 else f"{self._id}:{index}"

    def _request(self, index: int) -> ChatRequest:
        sampling = self._call.sampling
        if sampling.seed is not None and index:
            sampling = replace(sampling, seed=sampling.seed + index)
        return ChatRequest(
            id=self._call_id(index),
            adapter=self._target.adapter,
            sampling=sampling,
            client=self._client,
            run=self._run or self._call.body.art.thread or "",
            earlier=self._earlier,
            **self._call.asked,
        )

    def _record(self, index: int, reply: ChatReply) -> CallRecord:
        prompt = 0 if index else len(reply.prompt_token_ids)  # once, as in `usage`
        sampled, took = len(reply.token_ids), time.monotonic() - self._start
        self._series.ended(prompt, sampled, reply.finish_reason, took)
        self._context.input_tokens += prompt
        self._context.output_tokens += sampled
        self._context.finish_reasons += (reply.finish_reason,)
        if self._meter is not None:
            self._meter.count_tokens(prompt + sampled)
        if self._service.fleet is not None and self._run is not None:
            self._service.fleet.knows(self._run, [self._call_id(index)])
        return CallRecord(
            id=self._call_id(index),
            created_at=time.time(),
            policy=self._target.policy,
            version=self._target.version,
            model=self._target.model,
            tags=self._call.body.art,
            request=self._call.record | self._form.recorded,
            reply=message(reply),
            prompt_token_ids=reply.prompt_token_ids,
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            drawn_from=reply.drawn_from,
            temperature=self._call.sampling.temperature or 1.0,
            finish_reason=reply.finish_reason,
            excluded_because=reply.excluded_because,
            latency=took,
            began=self._began,
            retry=self._call.retry,
            images=self._call.images,
        )

    async def whole(self) -> bytes:
        """Sample and record; returns the answer."""
        if self._call.count == 1:  # without a task of its own
            replies = [await self._one(0)]
        else:
            tasks = [asyncio.create_task(self._one(index)) for index in range(self._call.count)]
            try:
                replies = await asyncio.gather(*tasks)
            finally:  # of choices, one of which fails, none is sampled on
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if not self._form.only_counts:
            records = [self._record(index, reply) for index, reply in enumerate(replies)]
            await self._service.store.add_calls(records)
        return await self._form.whole(self._frame, self._call, replies)

    async def _one(self, index: int) -> ChatReply:
        reply = None
        async for piece in self._service.sampler.chat(self._request(index)):
            if isinstance(piece, ChatReply):
                reply = piece  # no break: to close an unfinished generator costs a task
        if reply is None:
            raise EngineUnavailable("The sampler gave no reply.", retry_after=1)
        return reply

    async def stream(
        self, scope: Scope, receive: Receive, send: Send, stop_listening: Callable[[], None]
    ) -> None:
        """Answer by server-sent events. Errors before the first token are raised, not streamed."""
        async with aclosing(self._pieces()) as pieces:
            first = await anext(pieces)
            self._series.first_token(time.monotonic() - self._start)
            events = self._events(first, pieces)
            response = StreamingResponse(
                events, media_type="text/event-stream", headers=_STREAM_HEADERS
            )
            stop_listening()
            await response(scope, receive, send)

    async def _pieces(self) -> AsyncGenerator[IndexedPiece, None]:
        """The parts of all choices' replies as they arrive, each with its choice's index."""
        received: asyncio.Queue[tuple[int, ChatDelta | ChatReply | Exception]] = asyncio.Queue()

        async def follow(index: int) -> None:
            try:
                async with aclosing(self._service.sampler.chat(self._request(index))) as pieces:
                    async for piece in pieces:
                        received.put_nowait((index, piece))
                self._slots.give_back()  # now: a reader who does not read keeps none from others
            except Exception as error:  # noqa: BLE001 - raised below, where the request is answered
                received.put_nowait((index, error))

        tasks = [asyncio.create_task(follow(index)) for index in range(self._call.count)]
        unread = Counter[int]()  # pieces of replies that have not ended: about a token each
        try:
            unfinished = len(tasks)
            while unfinished:
                index, piece = await received.get()
                if isinstance(piece, Exception):
                    raise piece
                if isinstance(piece, ChatReply):
                    unfinished -= 1
                    del unread[index]
                else:
                    unread[index] += 1
                yield index, piece
        finally:
            if self._meter is not None:
                self._meter.count_tokens(unread.total())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _events(
        self, first: IndexedPiece, pieces: AsyncGenerator[IndexedPiece, None]
    ) -> AsyncGenerator[bytes, None]:
        form = self._form
        yield form.begin(self._frame, self._call)
        replies: list[ChatReply] = []
        following: IndexedPiece | None = first
        try:
            while following is not None:
                index, piece = following
                if isinstance(piece, ChatDelta):
                    yield form.delta(index, piece)
                else:
                    await self._service.store.add_calls([self._record(index, piece)])
                    replies.append(piece)
                    yield await form.end(index, piece)
                following = await anext(pieces, None)
        except ArtError as error:
            refusal = error if isinstance(error, RequestRefused) else EngineUnavailable(str(error))
            yield form.refusal(refusal)
            return
        yield form.close(replies)
