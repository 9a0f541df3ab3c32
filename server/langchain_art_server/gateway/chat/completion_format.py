"""The format of chat completions: what is answered, whole and as server-sent events.

Format: OpenAI's API reference, "The chat completion object" and "The chat completion chunk object".
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from pydantic_core import to_json

from langchain_art.errors import RequestRefused
from langchain_art_server.backends.base import ChatDelta, ChatReply
from langchain_art_server.gateway.chat.dialect import Dialect
from langchain_art_server.gateway.chat.request import CheckedChatRequest

#: Tokens whose logprobs are written in one turn of the event loop: half a millisecond.
_SLICE = 16
_DONE = b"data: [DONE]\n\n"
#: The characters at which `str.splitlines`, and with it httpx's `iter_lines`, ends a line and JSON
#: and server-sent events do not; what JSON writes for them.
_SEPARATORS = [(chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029)]


class ChatDialect(Dialect):
    """One request of chat completions, to which the others are translated."""

    prefix = "chatcmpl-"

    def __init__(self, raw: Any) -> None:
        super().__init__()
        self.body = raw

    def begin(self, frame: dict[str, Any], call: CheckedChatRequest) -> bytes:
        """See `Dialect`."""
        options = call.body.stream_options
        self._usage = options is not None and options.include_usage
        frame = frame | ({"usage": None} if self._usage else {})
        self._frame = frame | {"object": "chat.completion.chunk"}
        self._logprobs = bool(call.body.logprobs)
        # `ChatOpenAI` asks no server but OpenAI's for usage: a single choice's last chunk has it.
        self._counts = call.count == 1 and not self._usage
        self._calls = Counter[int]()  # tool calls so far, by choice
        first = {"role": "assistant", "content": ""}
        return b"".join(self._event(index, first) for index in range(call.count))

    def delta(self, index: int, piece: ChatDelta) -> bytes:
        """See `Dialect`."""
        delta: dict[str, Any] = {}
        if piece.content:
            delta["content"] = piece.content
        if piece.tool_calls:
            numbered = enumerate(piece.tool_calls, self._calls[index])
            delta["tool_calls"] = [{"index": number, **call} for number, call in numbered]
            self._calls[index] += len(piece.tool_calls)
        return self._event(index, delta)

    async def end(self, index: int, reply: ChatReply) -> bytes:
        """See `Dialect`. The last chunk: why it ended, usage if unasked for, tokens' logprobs."""
        if self._counts:
            self._frame["usage"] = usage([reply])
        event = self._event(index, {}, reply.finish_reason)
        if not self._logprobs:
            return event
        said = one_line(await logprobs(reply))
        return event.removesuffix(b"null}]}\n\n") + said + b"}]}\n\n"

    def close(self, replies: list[ChatReply]) -> bytes:
        """See `Dialect`."""
        if not self._usage:
            return _DONE
        return sse(self._frame | {"choices": [], "usage": usage(replies)}) + _DONE

    def _event(self, index: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
        # The id of the call, in each delta: LangChain's `ChatOpenAI` keeps none but this one.
        name = self._frame["id"]
        delta = delta | {"id": f"{name}:{index}" if index else name}
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
        return sse(self._frame | {"choices": [choice]})

    def refusal(self, error: RequestRefused) -> bytes:
        """See `Dialect`."""
        return sse(error.body())

    async def whole(
        self, frame: dict[str, Any], call: CheckedChatRequest, replies: list[ChatReply]
    ) -> bytes:
        """See `Dialect`."""
        answer = frame | {"object": "chat.completion", "usage": usage(replies)}
        choices = [
            {
                "index": index,
                "message": message(reply),
                "finish_reason": reply.finish_reason,
                "logprobs": None,
            }
            for index, reply in enumerate(replies)
        ]
        if not call.body.logprobs:
            return to_json(answer | {"choices": choices})
        parts: list[bytes] = []
        for choice, reply in zip(choices, replies, strict=True):
            parts.append(to_json(choice).removesuffix(b"null}") + await logprobs(reply) + b"}")
        return to_json(answer)[:-1] + b',"choices":[' + b",".join(parts) + b"]}"


def message(reply: ChatReply) -> dict[str, Any]:
    """The assistant's message."""
    answer: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        answer["tool_calls"] = reply.tool_calls
    return answer


async def logprobs(reply: ChatReply) -> bytes:
    """The ``logprobs`` of a choice, as JSON.

    With all that may be asked for they take a tenth of a second, so other requests have turns of
    the event loop in between.
    """
    parts: list[bytes] = []
    for start in range(0, len(reply.token_texts), _SLICE):
        if start:
            await asyncio.sleep(0)
        tokens: list[dict[str, Any]] = []
        for index, text in enumerate(reply.token_texts[start : start + _SLICE], start):
            top = reply.top_logprobs[index] if reply.top_logprobs else []
            others = [_token(other, value) for _, value, other in top]
            tokens.append(_token(text, reply.logprobs[index]) | {"top_logprobs": others})
        parts.append(to_json(tokens)[1:-1])
    return b'{"content":[' + b",".join(parts) + b'],"refusal":null}'


def _token(text: str, logprob: float) -> dict[str, Any]:
    # A part of a character has no text, and so no bytes that are known here.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": known}


def usage(replies: list[ChatReply]) -> dict[str, int]:
    """Token counts of a request: its prompt once, and the completions of all choices."""
    prompt = len(replies[0].prompt_token_ids)
    sampled = sum(len(reply.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def sse(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + one_line(to_json(value)) + b"\n\n"


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event that is named by its ``type``."""
    return b"event: " + value["type"].encode() + b"\n" + sse(value)


def one_line(text: bytes) -> bytes:
    """JSON as one line to every client."""
    if not text.isascii():
        for separator, escaped in _SEPARATORS:
            text = text.replace(separator, escaped)
    return text
