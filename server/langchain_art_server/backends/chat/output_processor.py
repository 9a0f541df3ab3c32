"""One reply between the tokens that an engine draws and what the client is sent.

Shared by the hosts of every engine, so that a prompt, a stop string, a tool call and a reason not
to train mean the same whichever engine samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from langchain_art.errors import InvalidRequest, PromptTooLong
from langchain_art_server.backends.base import ChatReply, ChatRequest, FinishReason, Sampling
from langchain_art_server.backends.chat.chat_template import ChatFormat
from langchain_art_server.backends.chat.detokenizer import ReplyText
from langchain_art_server.backends.chat.tool_parser import ReplyParser

#: A piece of a reply: text and whole tool calls.
Piece = tuple[str, list[dict[str, Any]]]


def read_request(params: dict[str, Any], coldest: float) -> ChatRequest:
    """The request that came through the engine's socket, checked.

    Args:
        params: the fields of `ChatRequest` as JSON.
        coldest: the lowest temperature but 0 that the engine computes as it is asked.

    Raises:
        InvalidRequest: there are no messages, or the temperature is below `coldest`.
    """
    sampling = Sampling(**params["sampling"])
    params["sampling"] = dataclasses.replace(sampling, stop=tuple(sampling.stop))
    request = ChatRequest(**params)
    if not request.messages:
        raise InvalidRequest("got no messages, expected at least one.", param="messages")
    if 0.0 < sampling.temperature < coldest:
        raise InvalidRequest(
            f"got temperature={sampling.temperature}, expected 0 (greedy) or at least {coldest}.",
            param="temperature",
        )
    return request


def room(prompt: int, max_tokens: int | None, max_model_len: int) -> int:
    """How many tokens a reply to a prompt of `prompt` tokens may have.

    Raises:
        PromptTooLong: none.
    """
    left = max_model_len - prompt
    if left < 1:
        raise PromptTooLong(
            f"got a prompt of {prompt} tokens, expected at most {max_model_len - 1}: the context "
            f"of {max_model_len} must have room for a reply. Shorten the messages, or serve with a "
            "larger max_model_len.",
            param="messages",
        )
    return left if max_tokens is None else max(1, min(max_tokens, left))


def why_excluded(request: ChatRequest, *, constrained: bool) -> str | None:
    """Why the learner could not repeat the distribution that a reply is drawn from."""
    sampling = request.sampling
    if constrained:
        forced = request.response_format is None
        return f"grammar: {'tool_choice' if forced else 'response_format'}"
    if sampling.temperature == 0.0:
        return "greedy decoding: temperature=0"
    if sampling.top_p < 1.0:
        return f"truncated sampling: top_p={sampling.top_p}"
    if sampling.top_k > 0:
        return f"truncated sampling: top_k={sampling.top_k}"
    return None


def hidden_ids(format: ChatFormat) -> set[int]:
    """Special tokens that no text shows, but for those that tool calls are made of."""
    markers = format.tools.markers if format.tools else ()
    return {
        id_
        for id_, token in format.tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in markers
    }


class Speech:
    """One reply while it grows: its text, its tool calls, and what of its tokens was read.

    Args:
        request: what was asked.
        format: of the model.
        hidden: see `hidden_ids`.
        eos: tokens that end a turn.
    """

    def __init__(
        self, request: ChatRequest, format: ChatFormat, hidden: Collection[int], eos: set[int]
    ) -> None:
        self._format, self._hidden, self._eos = format, hidden, eos
        parses = bool(request.tools) and request.tool_choice != "none"
        self._text = ReplyText(self._visible, request.sampling.stop)
        self._parser = ReplyParser(
            format.tools if parses else None, one_call=not request.parallel_tool_calls
        )
        self._read = 0

    @property
    def stopped(self) -> bool:
        """A stop string was found."""
        return self._text.stopped

    def hear(self, out: Sequence[int]) -> Piece:
        """Read on in `out`, all tokens so far; returns what is certain now."""
        new, self._read = out[self._read :], len(out)
        return self._parser.feed(self._text.push(new)) if new else ("", [])

    def end(self, out: Sequence[int]) -> Piece:
        """The reply is over; returns what was held back."""
        rest = out[self._read :]
        if rest and rest[-1] in self._eos:
            rest = rest[:-1]
        content, calls = self._parser.feed(self._text.push(rest, last=True))
        more, more_calls = self._parser.finish()
        return content + more, calls + more_calls

    def reply(
        self,
        prompt_ids: Sequence[int],
        out: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[Sequence[tuple[int, float]]],
        finish: FinishReason,
        excluded_because: str | None,
    ) -> ChatReply:
        """The finished reply, once `end` was called. `excluded_because`: see `why_excluded`."""
        parser, token_text = self._parser, self._format.token_text
        return ChatReply(
            prompt_token_ids=prompt_ids,
            token_ids=out,
            logprobs=logprobs,
            content=parser.content or (None if parser.calls else ""),
            tool_calls=parser.calls,
            finish_reason="tool_calls" if parser.calls and finish == "stop" else finish,
            excluded_because=excluded_because,
            top_logprobs=[[(i, p, token_text(i)) for i, p in one] for one in top],
            token_texts=[token_text(i) for i in out],
        )

    def _visible(self, ids: Sequence[int]) -> str:
        return self._format.text([i for i in ids if i not in self._hidden])
