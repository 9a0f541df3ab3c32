"""From messages to token ids: the model's chat template, and the exact ids of sampled text.

A text can often be tokenised in several ways, and a model does not always sample the tokenizer's
own. So that a later prompt holds the tokens that were sampled, the ids of every prompt and reply
are kept under a digest of their text. A later prompt whose rendered text begins with a kept text
takes those ids, and only the rest is tokenised. Both parts meet at an end-of-turn token, across
which no tokenizer merges.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, cast

from jinja2 import TemplateError

from langchain_art.errors import ConfigError, InvalidRequest, PromptTooLong
from langchain_art.wire.prefixes import common_prefix_length
from langchain_art_server.backends.chat.tool_parser import ToolFormat, arguments_object, tool_format

#: Token ids that are kept, 4 bytes each.
_MAX_KEPT_IDS = 8_000_000
#: Most replies with the same text that are kept; they differ in the ids of their tool calls.
_SAME_TEXT = 64


@dataclass(frozen=True)
class _KeptText:
    ids: array[int]
    call_ids: tuple[str, ...]


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt; `ids` are its tokens: for text that was sampled here, the sampled ones."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    text: str
    ids: list[int]


class ChatTemplate:
    """Renders and tokenises messages for one model. Several threads may ask for prompts.

    Args:
        tokenizer: of transformers, with a chat template.
        eos: ids of the tokens that end a turn.
        tools: how the model writes tool calls; None: recognised by the template.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, eos: set[int], tools: ToolFormat | None = None) -> None:
        self.tokenizer = tokenizer
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise ConfigError(
                "The model's tokenizer has no chat template, so messages can not be shown to it. "
                "Use an instruction-tuned model, or save the tokenizer with `chat_template` set."
            )
        if isinstance(template, dict):
            template = "\n".join(map(str, cast(dict[str, Any], template).values()))
        self.tools = tools or tool_format(template)
        self._knows_developer = "developer" in template
        self.eos = eos
        self._eos = {text: id_ for id_ in eos if (text := tokenizer.decode([id_]))}
        self._turn_end = re.compile("|".join(map(re.escape, self._eos)) or r"(?!)")
        self._lock = threading.Lock()  # of the kept tokens
        self._known: OrderedDict[bytes, list[_KeptText]] = OrderedDict()
        self._held = 0
        self._texts: dict[int, str] = {}
        # The first one changes the tokenizer if it was saved with truncation or padding, which it
        # must not do while another thread uses it.
        self._encode("")

    # --- rendering ------------------------------------------------------------------------------

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        most: int | None = None,
    ) -> Prompt:
        """Render, and tokenise if there are at most so many characters.

        Raises:
            InvalidRequest: a message can not be shown to this model; says which and why.
            PromptTooLong: there are more than `most`.
        """
        text = self._render(messages, tools, reply=False)
        if most is not None and len(text) > most:
            raise PromptTooLong(
                f"got a prompt of {len(text)} characters with the chat template, expected at most "
                f"{most}: a longer one cannot fit the context. Shorten the messages or tools, or "
                "serve with a larger max_model_len.",
                param="messages",
            )
        call_ids = _call_ids(messages)
        for mark, after, known in self._candidates(text, call_ids):
            rest = self._encode_rest(text, mark, after)
            if rest is not None:
                return Prompt(messages, tools, text, [*known.ids, *rest])
        return Prompt(messages, tools, text, self._encode(text))

    def reply_ids(self, prompt: Prompt, reply: dict[str, Any]) -> list[int]:
        """The tokens of a reply as if it had been sampled after `prompt`, its end included.

        They are what the template adds to the prompt for the reply, up to the end-of-turn token.

        Raises:
            InvalidRequest: the template renders the prompt differently with the reply than without
                it, adds more than one turn, or does not end the turn with an end-of-turn token.
        """
        text = self._render([*prompt.messages, reply], prompt.tools, reply=True)
        if not text.startswith(prompt.text):
            same = common_prefix_length(prompt.text, text)
            raise InvalidRequest(
                "The model's chat template renders these messages differently when a reply "
                f"follows: from character {same} on, the prompt is {prompt.text[same:][:80]!r}, "
                f"and with the reply {text[same:][:80]!r}. So the tokens of the reply are not "
                "defined; correct the template, or leave this reply out.",
                param="messages",
            )
        added = text[len(prompt.text) :]
        end = self._turn_end.search(added)
        if end is None or self._turn_end.sub("", added[end.end() :]).strip():
            raise InvalidRequest(
                f"got the reply {added[-160:]!r} as the chat template writes it, expected one turn "
                f"with one of {sorted(self._eos)} at its end: without it the model would not learn "
                "to stop, and with it inside of the reply it would learn to stop there.",
                param="messages",
            )
        marks = list(self._turn_end.finditer(prompt.text))
        start = marks[-1].start() if marks else 0
        before = self._encode(prompt.text[start:])
        ids = self._encode(prompt.text[start:] + added[: end.end()])
        # A token across the border of prompt and reply can not be sampled.
        merged = ids[: len(before)] != before
        ids = self._encode(added[: end.end()]) if merged else ids[len(before) :]
        if not ids or ids[-1] != self._eos[end.group()]:
            raise InvalidRequest(
                f"The tokenizer does not write {end.group()!r} as its token "
                f"{self._eos[end.group()]}; the reply's tokens end with {ids[-3:]}.",
                param="messages",
            )
        return ids

    def remember(self, prompt: Prompt, token_ids: list[int], reply: dict[str, Any]) -> None:
        """Keep the ids of a finished call for later prompts of the same conversation.

        `reply` is the assistant message that the client will send back.
        """
        added = self.text(prompt.ids[-1:] + token_ids)[len(self.text(prompt.ids[-1:])) :]
        ids = array("i", [*prompt.ids, *token_ids])
        calls = reply.get("tool_calls") or []
        call_ids = _call_ids([*prompt.messages, reply])
        self._keep(prompt.text + added, _KeptText(ids, call_ids))
        ended = self._turn_end.search(added)
        content = reply.get("content") or ""
        if ended is None or (not calls and added[: ended.start()] == content == content.strip()):
            return
        # The client sends back a parsed reply, which the template may render with other white
        # space: that text is kept for the same tokens.
        try:
            text = self._render([*prompt.messages, reply], prompt.tools, reply=True)
        except InvalidRequest:
            return
        ends = [match.end() for match in self._turn_end.finditer(text)]
        if ends and text[: ends[-1]] != prompt.text + added:
            self._keep(text[: ends[-1]], _KeptText(ids, call_ids))

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, reply: bool
    ) -> str:
        messages = [_template_message(i, m) for i, m in enumerate(messages)]
        if not self._knows_developer:  # OpenAI's newer name of the role; templates drop it
            for message in messages:
                if message.get("role") == "developer":
                    message["role"] = "system"
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=not reply, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise InvalidRequest(
                f"The model's chat template refused these messages: {error}", param="messages"
            ) from error
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"got text that is not Unicode ({error.reason}); remove lone surrogates.",
                param="messages",
            ) from error
        return text

    # --- kept tokens ----------------------------------------------------------------------------

    def _candidates(
        self, text: str, call_ids: tuple[str, ...]
    ) -> list[tuple[re.Match[str], bool, _KeptText]]:
        """Kept beginnings of `text`, the longest first.

        Each ends before an end-of-turn token (the reply was cut short), or after it (True).
        """
        if not self._known:
            return []
        digest, at = blake2b(digest_size=16), 0
        found: list[tuple[re.Match[str], bool, _KeptText]] = []
        for mark in self._turn_end.finditer(text):
            for cut, after in ((mark.start(), False), (mark.end(), True)):
                digest.update(text[at:cut].encode())
                at = cut
                key = digest.digest()
                with self._lock:
                    if same_text := self._known.get(key):
                        self._known.move_to_end(key)
                        found.append((mark, after, _best(same_text, call_ids)))
        return found[::-1]

    def _keep(self, text: str, known: _KeptText) -> None:
        key = blake2b(text.encode(), digest_size=16).digest()
        with self._lock:
            self._insert(key, known)

    def _insert(self, key: bytes, known: _KeptText) -> None:
        same_text = self._known.setdefault(key, [])
        for old in [k for k in same_text if k.call_ids == known.call_ids] or same_text[
            :-_SAME_TEXT
        ]:
            same_text.remove(old)
            self._held -= len(old.ids)
        same_text.append(known)
        self._known.move_to_end(key)
        self._held += len(known.ids)
        while self._held > _MAX_KEPT_IDS:
            _, dropped = self._known.popitem(last=False)
            self._held -= sum(len(k.ids) for k in dropped)

    def _encode_rest(self, text: str, mark: re.Match[str], after: bool) -> list[int] | None:
        """Tokenise what follows a kept beginning.

        Tokenised from the end-of-turn token `mark` on, which is dropped if it belongs to the kept
        part. None if the tokenizer does not give that token.
        """
        ids = self._encode(text[mark.start() :])
        try:
            at = ids.index(self._eos[mark.group()])
        except ValueError:
            return None
        return ids[at + after :]

    # --- tokens and text ------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def reply_text(self, ids: Sequence[int]) -> str:
        """The text of `ids` as a client reads it: of special tokens, only those of tool calls."""
        return self.text([id_ for id_ in ids if id_ not in self._hidden])

    @cached_property
    def _hidden(self) -> set[int]:
        markers = self.tools.markers if self.tools else ()
        return {
            id_
            for id_, token in self.tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in markers
        }

    def token_text(self, token: int) -> str:
        """The text of one token."""
        if token not in self._texts:
            self._texts[token] = self.text([token])
        return self._texts[token]


def _best(same_text: list[_KeptText], call_ids: tuple[str, ...]) -> _KeptText:
    fits = (k for k in reversed(same_text) if k.call_ids == call_ids[: len(k.call_ids)])
    return next(fits, same_text[-1])


def _call_ids(messages: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(
        str(call.get("id")) for message in messages for call in message.get("tool_calls") or ()
    )


def _template_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content is a string, arguments are an object."""
    shown = dict(message, content=_plain(index, message.get("content")))
    if message.get("tool_calls"):
        shown["tool_calls"] = [
            _template_call(f"messages[{index}].tool_calls[{i}]", call)
            for i, call in enumerate(message["tool_calls"])
        ]
    else:
        shown.pop("tool_calls", None)
    return shown


def _template_call(where: str, call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            function["arguments"] = arguments_object(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"{where}.function.arguments is not a JSON object: {error}. Send the arguments as "
                "the model gave them.",
                param=where,
            ) from error
    return {**call, "function": function}


def _plain(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(cast(list[Any], content) if isinstance(content, list) else [content]):
        if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidRequest(
                f"messages[{index}].content[{i}]: got a part of type {kind!r}, expected 'text': "
                "this model reads text only.",
                param=f"messages[{index}].content",
            )
        if not isinstance(part["text"], str):
            raise InvalidRequest(
                f"messages[{index}].content[{i}].text: got {part['text']!r}, expected a string.",
                param=f"messages[{index}].content",
            )
        texts.append(part["text"])
    return "".join(texts)
