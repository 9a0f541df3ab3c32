"""A chat completion's answer, whole and in chunks.

Format: OpenAI's API reference, "The chat completion object" and "The chat completion chunk object".
"""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json

from langchain_art_server.backends.base import ChatDelta, ChatReply

DONE = b"data: [DONE]\n\n"


def message(reply: ChatReply) -> dict[str, Any]:
    """The assistant's message."""
    answer: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        answer["tool_calls"] = reply.tool_calls
    return answer


def logprobs(reply: ChatReply) -> dict[str, Any]:
    """The ``logprobs`` of a choice."""
    content: list[dict[str, Any]] = []
    for index, text in enumerate(reply.token_texts):
        top = reply.top_logprobs[index] if reply.top_logprobs else []
        others = [_token(other, value) for _, value, other in top]
        content.append(_token(text, reply.logprobs[index]) | {"top_logprobs": others})
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage(replies: list[ChatReply]) -> dict[str, int]:
    """Token counts of a request: its prompt once, and the completions of all choices."""
    prompt = len(replies[0].prompt_token_ids)
    sampled = sum(len(reply.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def completion(
    frame: dict[str, Any], replies: list[ChatReply], with_logprobs: bool
) -> dict[str, Any]:
    """The whole answer. `frame` holds ``id``, ``created`` and ``model``."""
    choices = [
        {
            "index": index,
            "message": message(reply),
            "finish_reason": reply.finish_reason,
            "logprobs": logprobs(reply) if with_logprobs else None,
        }
        for index, reply in enumerate(replies)
    ]
    return frame | {"object": "chat.completion", "choices": choices, "usage": usage(replies)}


class Chunks:
    """One choice's chunks, as server-sent events."""

    def __init__(self, frame: dict[str, Any], index: int) -> None:
        self._frame = frame | {"object": "chat.completion.chunk"}
        self._index, self._calls = index, 0

    def begin(self) -> bytes:
        """The first chunk, with the role."""
        return self._event({"role": "assistant", "content": ""})

    def delta(self, piece: ChatDelta) -> bytes:
        """A part of the reply."""
        delta: dict[str, Any] = {}
        if piece.content:
            delta["content"] = piece.content
        if piece.tool_calls:
            numbered = enumerate(piece.tool_calls, self._calls)
            delta["tool_calls"] = [{"index": number, **call} for number, call in numbered]
            self._calls += len(piece.tool_calls)
        return self._event(delta)

    def end(self, reply: ChatReply, with_logprobs: bool) -> bytes:
        """The last chunk: the reason to stop, and the logprobs of all tokens."""
        return self._event({}, reply.finish_reason, logprobs(reply) if with_logprobs else None)

    def _event(
        self, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": self._index, "delta": delta, "finish_reason": finish}
        return sse(self._frame | {"choices": [choice | {"logprobs": logprobs}]})


def usage_chunk(frame: dict[str, Any], replies: list[ChatReply]) -> bytes:
    """The chunk with the usage of all choices, after their last."""
    about = frame | {"object": "chat.completion.chunk"}
    return sse(about | {"choices": [], "usage": usage(replies)})


def sse(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"
