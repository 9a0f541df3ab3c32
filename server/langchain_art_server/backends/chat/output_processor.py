"""Output processor: from sampled tokens to the deltas and the reply that the client gets.

All engines use it, so that stop strings, tool calls, limits and the reasons not to train mean the
same whichever engine samples.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from langchain_art.errors import PromptTooLong
from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest, FinishReason
from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.chat.detokenizer import Detokenizer
from langchain_art_server.backends.chat.tool_parser import ToolCallParser


def reply_limit(prompt: int, max_tokens: int | None, max_model_len: int) -> int:
    """How many tokens a reply to a prompt of `prompt` tokens may have, at least 1.

    Raises:
        PromptTooLong: the context has no room for a reply.
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
    """Why the learner cannot repeat the distribution that a reply is sampled from, if it cannot."""
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


def hidden_token_ids(template: ChatTemplate) -> set[int]:
    """Special tokens that are left out of texts: all but those that tool calls are made of."""
    markers = template.tools.markers if template.tools else ()
    return {
        id_
        for id_, token in template.tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in markers
    }


class OutputProcessor:
    """Text and tool calls of one reply while it is sampled.

    Args:
        request: what was asked.
        template: of the model.
        hidden: see `hidden_token_ids`.
        eos: tokens that end a turn.
    """

    def __init__(
        self, request: ChatRequest, template: ChatTemplate, hidden: Collection[int], eos: set[int]
    ) -> None:
        self._template, self._hidden, self._eos = template, hidden, eos
        parses = bool(request.tools) and request.tool_choice != "none"
        self._text = Detokenizer(self._decode, request.sampling.stop)
        self._parser = ToolCallParser(
            template.tools if parses else None, one_call=not request.parallel_tool_calls
        )
        self._read = 0

    @property
    def stopped(self) -> bool:
        """A stop string was found."""
        return self._text.stopped

    def update(self, token_ids: Sequence[int]) -> ChatDelta:
        """Process `token_ids`, all tokens so far; returns what is new and final."""
        new, self._read = token_ids[self._read :], len(token_ids)
        return self._parser.feed(self._text.push(new)) if new else ChatDelta()

    def finish(self, token_ids: Sequence[int]) -> ChatDelta:
        """End the reply; returns what was held back."""
        rest = token_ids[self._read :]
        if rest and rest[-1] in self._eos:
            rest = rest[:-1]
        delta, end = self._parser.feed(self._text.push(rest, last=True)), self._parser.finish()
        return ChatDelta(delta.content + end.content, delta.tool_calls + end.tool_calls)

    def reply(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[Sequence[tuple[int, float]]],
        finish: FinishReason,
        excluded_because: str | None,
    ) -> ChatReply:
        """The finished reply, after `finish`. `excluded_because`: see `why_excluded`."""
        parser, token_text = self._parser, self._template.token_text
        return ChatReply(
            prompt_token_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            content=parser.content or (None if parser.calls else ""),
            tool_calls=parser.calls,
            finish_reason="tool_calls" if parser.calls and finish == "stop" else finish,
            excluded_because=excluded_because,
            top_logprobs=[[(i, p, token_text(i)) for i, p in one] for one in top],
            token_texts=[token_text(i) for i in token_ids],
        )

    def _decode(self, ids: Sequence[int]) -> str:
        return self._template.text([i for i in ids if i not in self._hidden])
