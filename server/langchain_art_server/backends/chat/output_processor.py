"""Output processor: from sampled tokens to the deltas and the reply that the client gets.

All engines use it, so that stop strings, tool calls, limits and the reasons not to train mean the
same whichever engine samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from langchain_art.errors import PromptTooLong
from langchain_art_server.backends.base import ChatDelta, ChatRequest, Sampling
from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.chat.tool_calls.call_format import ToolCallParser, overlap

_INCOMPLETE = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


def reply_limit(prompt: int, max_tokens: int | None, max_model_len: int) -> int:
    """Number of tokens a reply to a prompt of `prompt` tokens may have, at least 1.

    Raises PromptTooLong: the context has no room for a reply.
    """
    left = max_model_len - prompt
    if left < 1:
        raise PromptTooLong(
            f"The prompt is too long: got {prompt} tokens, expected at most {max_model_len - 1}: "
            f"the context of {max_model_len} must have room for a reply. Shorten the messages, or "
            "serve with a larger max_model_len.",
            param="messages",
        )
    return left if max_tokens is None else max(1, min(max_tokens, left))


def truncates(sampling: Sampling) -> bool:
    """True if tokens are drawn from the most probable ones alone."""
    return sampling.temperature > 0 and (sampling.top_p < 1.0 or sampling.top_k > 0)


def why_excluded(
    request: ChatRequest, problem: str, *, grammar: bool, logprobs: Sequence[float]
) -> str | None:
    """Reason why the learner cannot learn from a reply by how it is sampled, if it cannot.

    `problem` is why it is not known which tokens could be drawn, or empty. `logprobs` are those of
    the reply's tokens, over those that could be drawn.
    """
    sampling = request.sampling
    if sampling.temperature == 0.0:
        return "greedy decoding: temperature=0"
    by = ""
    if truncates(sampling):
        name = "top_p" if sampling.top_p < 1.0 else "top_k"
        by = f"{name}={getattr(sampling, name)}"
        if problem:
            return f"truncated sampling: {by}; {problem}"
    elif grammar or problem:
        by = "tool_choice" if request.response_format is None else "response_format"
        if problem:
            return f"grammar: {by}; {problem}"
    elif sampling.temperature < 1.0:
        by = f"temperature={sampling.temperature}"
    if by and logprobs and not any(logprobs):
        return f"no choice: {by}; each token had the probability 1"
    return None


class Detokenizer:
    """Decodes tokens while they are sampled, up to the first of the `stop` strings."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: tuple[str, ...] = ()) -> None:
        self._decode, self._stop = decode, tuple(filter(None, stop))
        self._ids: list[int] = []
        self._prefix = self._read = 0
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was found."""

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Add tokens; returns the new text that is final.

        Incomplete characters and what may be the beginning of a stop string are held back, unless
        these are the `last` tokens.
        """
        self._ids += ids
        # Decoded after a few earlier tokens: some tokenizers treat the first token differently.
        before = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        if text.endswith(_INCOMPLETE) and not last:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        if self.stopped is not None:
            return ""
        text = self._held + text[len(before) :]
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found)
            self._held = ""
            return text[:at]
        keep = 0 if last else max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class OutputProcessor:
    """Text and tool calls of one reply to the tokens `prompt` while it is sampled.

    A call with a seed draws the ids of its tool calls from the seed and the prompt, since templates
    write them into later prompts.

    Raises InvalidRequest: it may call tools, in a format that is not known here.
    """

    def __init__(self, request: ChatRequest, template: ChatTemplate, prompt: Sequence[int]) -> None:
        seed = request.sampling.seed
        self._eos, self._read = template.eos, 0
        self._text = Detokenizer(template.reply_text, request.sampling.stop)
        self.parser = ToolCallParser(
            template.tools,
            request.tools,
            calls=template.may_call(request),
            one_call=not request.parallel_tool_calls,
            ids=None if seed is None else Random(hash((seed, *prompt))),
        )

    @property
    def stopped(self) -> str | None:
        """The stop string that was found."""
        return self._text.stopped

    def update(self, token_ids: Sequence[int], *, last: bool = False) -> ChatDelta:
        """Process `token_ids`, all tokens so far; returns what is new and final.

        What is held back is returned at the `last` update.
        """
        new, self._read = token_ids[self._read :], len(token_ids)
        if last and new and new[-1] in self._eos:
            new = new[:-1]
        if not new and not last:
            return ChatDelta()
        return self.parser.feed(self._text.push(new, last=last), last=last)


def token_texts(model: str, token_ids: Sequence[int]) -> list[str] | None:
    """Text that each token of a reply adds; special tokens by their names.

    A character of several tokens stands with the last of them; the others add nothing. `model` is a
    folder, or a name on the Hub whose files are in this machine's cache. None: it has no
    ``tokenizer.json``, which alone is read.
    """
    tokenizer = _tokenizer(model)
    if tokenizer is None:
        return None
    text = Detokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    last = len(token_ids) - 1
    return [text.push([one], last=at == last) for at, one in enumerate(token_ids)]


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> Any:
    # A server without viewers needs neither.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
    from tokenizers import Tokenizer  # noqa: PLC0415

    if Path(model).is_dir():
        path: object = str(Path(model) / "tokenizer.json")
    else:  # a path, None, or what stands for "known not to exist"
        path = try_to_load_from_cache(model, "tokenizer.json")
    return Tokenizer.from_file(path) if isinstance(path, str) and Path(path).is_file() else None
