"""From messages to token ids: the model's chat template, and exact ids for what was sampled.

A reply's text can often be tokenised in several ways, and a model does not always choose the
tokenizer's own. So that a later prompt holds the very tokens that were sampled, the ids of every
prompt and completion are kept under a digest of their text. A later prompt whose rendered text
begins with a known text takes those ids and tokenises only the rest. Both parts meet at an
end-of-turn token, across which no tokenizer merges.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

from jinja2 import TemplateError

from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art_server.backends.chat.tool_parser import ToolFormat, arguments_object, tool_format

#: Token ids that are remembered, 4 bytes each.
_REMEMBERED_IDS = 8_000_000
#: Completions with the same text that are told apart by their tool calls' ids.
_SAME_TEXT = 64


@dataclass(frozen=True)
class _Known:
    ids: array[int]
    call_ids: tuple[str, ...]


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        text: what the template made of the messages.
        ids: its tokens; where the text was sampled here, the sampled ones.
        call_ids: ids of the tool calls in the messages, in order.
        reused: how many of `ids` were taken over from an earlier call.
    """

    text: str
    ids: list[int]
    call_ids: tuple[str, ...]
    reused: int


class ChatFormat:
    """Renders and tokenises for one model.

    Args:
        tokenizer: of transformers, with a chat template.
        eos: ids of the tokens that end a turn.
        tools: how the model writes tool calls; None: read off the template.

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
        self._eos = {text: id_ for id_ in eos if (text := tokenizer.decode([id_]))}
        self._turn_end = re.compile("|".join(map(re.escape, self._eos)) or r"(?!)")
        self._known: OrderedDict[bytes, list[_Known]] = OrderedDict()
        self._held = 0
        self._texts: dict[int, str] = {}

    # --- rendering ------------------------------------------------------------------------------

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Prompt:
        """Render and tokenise.

        Raises:
            InvalidRequest: a message can not be shown to this model; says which and why.
        """
        text = self._render([_shown(i, m) for i, m in enumerate(messages)], tools, reply=False)
        call_ids = _call_ids(messages)
        for mark, after, known in self._candidates(text, call_ids):
            rest = self._encode_rest(text, mark, after)
            if rest is not None:
                return Prompt(text, [*known.ids, *rest], call_ids, len(known.ids))
        return Prompt(text, self._encode(text), call_ids, 0)

    def reply_ids(
        self,
        prompt: Prompt,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        reply: dict[str, Any],
    ) -> list[int]:
        """The tokens of a reply as if it had been sampled after `prompt`, its end included.

        They are what the template adds to the prompt for the reply, up to the end-of-turn token,
        tokenised in its place: nothing is searched for.

        Raises:
            InvalidRequest: the template shows the conversation otherwise with the reply than before
                it, adds more than one turn, or ends it with no token that ends a turn.
        """
        shown = [_shown(i, m) for i, m in enumerate([*messages, reply])]
        text = self._render(shown, tools, reply=True)
        if not text.startswith(prompt.text):
            pairs = enumerate(zip(prompt.text, text, strict=False))
            same = next((i for i, (one, other) in pairs if one != other), len(text))
            raise InvalidRequest(
                "The model's chat template shows these messages otherwise when a reply follows "
                f"them: from character {same} on, the prompt is {prompt.text[same:][:80]!r}, and "
                f"with the reply {text[same:][:80]!r}. So there is no telling which tokens the "
                "model would have said; mend the template, or leave this reply out.",
                param="messages",
            )
        said = text[len(prompt.text) :]
        end = self._turn_end.search(said)
        if end is None or self._turn_end.sub("", said[end.end() :]).strip():
            raise InvalidRequest(
                f"got the reply {said[-160:]!r} as the chat template writes it, expected one turn "
                f"with one of {sorted(self._eos)} at its end: without it the model would not learn "
                "to stop, and with it inside of the reply it would learn to stop there.",
                param="messages",
            )
        marks = list(self._turn_end.finditer(prompt.text))
        start = marks[-1].start() if marks else 0
        before = self._encode(prompt.text[start:])
        ids = self._encode(prompt.text[start:] + said[: end.end()])
        joins = ids[: len(before)] != before  # across the border, which a sampler never does
        ids = self._encode(said[: end.end()]) if joins else ids[len(before) :]
        if not ids or ids[-1] != self._eos[end.group()]:
            raise InvalidRequest(
                f"The tokenizer does not write {end.group()!r} as its token "
                f"{self._eos[end.group()]}; the reply's tokens end with {ids[-3:]}.",
                param="messages",
            )
        return ids

    def remember(
        self,
        prompt: Prompt,
        token_ids: list[int],
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        reply: dict[str, Any],
    ) -> None:
        """Keep the ids of a finished call for the prompts that go on from it.

        Args:
            prompt: what the model was shown.
            token_ids: what it said.
            messages: the call's messages.
            tools: the call's tools.
            reply: the assistant message that the client will send back.
        """
        said = self.text(prompt.ids[-1:] + token_ids)[len(self.text(prompt.ids[-1:])) :]
        ids = array("i", [*prompt.ids, *token_ids])
        calls = reply.get("tool_calls") or []
        call_ids = (*prompt.call_ids, *(call["id"] for call in calls))
        self._keep(prompt.text + said, _Known(ids, call_ids))
        ended = self._turn_end.search(said)
        content = reply.get("content") or ""
        if ended is None or (not calls and said[: ended.start()] == content == content.strip()):
            return
        # The client sends back a parsed reply, and templates write calls and white space in their
        # own way: what this reply will look like then stands for the same tokens.
        try:
            shown = [_shown(i, m) for i, m in enumerate([*messages, reply])]
            text = self._render(shown, tools, reply=True)
        except InvalidRequest:
            return
        ends = [match.end() for match in self._turn_end.finditer(text)]
        if ends and text[: ends[-1]] != prompt.text + said:
            self._keep(text[: ends[-1]], _Known(ids, call_ids))

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, reply: bool
    ) -> str:
        if not self._knows_developer:  # OpenAI's newer name for the system; templates skip it
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message
                for message in messages
            ]
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

    # --- tokens that are known ------------------------------------------------------------------

    def _candidates(
        self, text: str, call_ids: tuple[str, ...]
    ) -> list[tuple[re.Match[str], bool, _Known]]:
        """Known beginnings of `text`, the longest first.

        Each ends before an end-of-turn token (the reply was cut short), or after it (True).
        """
        if not self._known:
            return []
        marks = list(self._turn_end.finditer(text))
        cuts = [(m.start(), m, False) for m in marks] + [(m.end(), m, True) for m in marks]
        cuts.sort(key=lambda cut: cut[0])
        digest, at = blake2b(digest_size=16), 0
        found: list[tuple[re.Match[str], bool, _Known]] = []
        for cut, mark, after in cuts:
            digest.update(text[at:cut].encode())
            at = cut
            key = digest.digest()
            if same_text := self._known.get(key):
                self._known.move_to_end(key)
                found.append((mark, after, _best(same_text, call_ids)))
        return found[::-1]

    def _keep(self, text: str, known: _Known) -> None:
        key = blake2b(text.encode(), digest_size=16).digest()
        same_text = self._known.setdefault(key, [])
        for old in [k for k in same_text if k.call_ids == known.call_ids] or same_text[
            :-_SAME_TEXT
        ]:
            same_text.remove(old)
            self._held -= len(old.ids)
        same_text.append(known)
        self._known.move_to_end(key)
        self._held += len(known.ids)
        while self._held > _REMEMBERED_IDS:
            _, dropped = self._known.popitem(last=False)
            self._held -= sum(len(k.ids) for k in dropped)

    def _encode_rest(self, text: str, mark: re.Match[str], after: bool) -> list[int] | None:
        """Tokenise what follows a known beginning, as it is tokenised in its place.

        Tokenised from the end-of-turn token `mark` on, which is dropped if it belongs to the known
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

    def token_text(self, token: int) -> str:
        """The text of one token."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.text([token])
        return text


def _best(same_text: list[_Known], call_ids: tuple[str, ...]) -> _Known:
    for known in reversed(same_text):
        if known.call_ids == call_ids[: len(known.call_ids)]:
            return known
    return same_text[-1]


def _call_ids(messages: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(
        str(call.get("id")) for message in messages for call in message.get("tool_calls") or ()
    )


def _shown(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates want it: content a string, arguments an object."""
    shown = dict(message, content=_plain(index, message.get("content")))
    if message.get("tool_calls"):
        shown["tool_calls"] = [
            _shown_call(f"messages[{index}].tool_calls[{i}]", call)
            for i, call in enumerate(message["tool_calls"])
        ]
    else:
        shown.pop("tool_calls", None)
    return shown


def _shown_call(where: str, call: dict[str, Any]) -> dict[str, Any]:
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
        texts.append(str(part["text"]))
    return "".join(texts)
