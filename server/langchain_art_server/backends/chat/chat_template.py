"""Rendering of messages to token ids: the model's chat template, and exact ids of sampled text.

A text can often be tokenised in several ways, and a model does not always sample the tokenizer's
own. So that a later prompt holds the tokens that were sampled, the ids of every prompt and reply
are kept under a digest of their text. A later prompt whose rendered text begins with a kept text
takes those ids, and only the rest is tokenised. Both parts meet at an end-of-turn token, across
which no tokenizer merges.
"""

from __future__ import annotations

import itertools
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from langchain_art.errors import ConfigError, InvalidRequest, PromptTooLong
from langchain_art.wire.turn_links import common_prefix_length
from langchain_art_server.algorithms.sequences.image_tokens import id_array
from langchain_art_server.backends.base import ChatRequest, EarlierCall
from langchain_art_server.backends.chat.message_shapes import RENDER_ERRORS, MessageShapes
from langchain_art_server.backends.chat.tool_calls.call_format import ToolCallParser, ToolFormat
from langchain_art_server.backends.chat.tool_calls.formats import FORMATS, names_of
from langchain_art_server.backends.chat.tool_calls.json_calls import arguments_object

if TYPE_CHECKING:
    from langchain_art_server.backends.models.images import Image

_REPLACED = "\ufffd"  # what bytes that are not UTF-8 are decoded to
#: What a later turn begins with when it is looked up how the template shows a reply before it.
_NEXT_TURN = "what follows the reply"
#: Bytes of texts' tokens that are kept, and those of an entry beside its ids (as measured).
_MAX_KEPT, _ENTRY = 32 << 20, 512
#: Most replies with the same text that are kept; they differ in the ids of their tool calls.
_SAME_TEXT = 64
_NAME = 64  # characters of an image's name


@dataclass(frozen=True)
class KeptText:
    """The ids of a text, and the ids of the tool calls in it."""

    ids: array[int]
    call_ids: tuple[str, ...]


class KeptTokens:
    """Cache of texts' tokens; the longest unused ones are forgotten first. Used by several threads.

    A later text may begin with a kept one that ends before or after a match of `turn_end`.
    """

    def __init__(self, turn_end: re.Pattern[str]) -> None:
        self._turn_end = turn_end
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, list[KeptText]] = OrderedDict()
        self._held = 0

    def beginnings(
        self, text: str, call_ids: tuple[str, ...], tenant: str = ""
    ) -> list[tuple[re.Match[str], bool, KeptText]]:
        """Beginnings of `text` in the cache that were a tenant's own, the longest first.

        Each ends before an end-of-turn token (the reply was cut short), or after it (True).
        """
        if not self._known:
            return []
        digest, at = _digest(tenant), 0
        found: list[tuple[re.Match[str], bool, KeptText]] = []
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

    def keep(self, text: str, known: KeptText, tenant: str = "") -> None:
        """Keep the ids of a tenant's text."""
        digest = _digest(tenant)
        digest.update(text.encode())
        key = digest.digest()
        with self._lock:
            self._insert(key, known)

    def _insert(self, key: bytes, known: KeptText) -> None:
        same_text = self._known.setdefault(key, [])
        for old in [k for k in same_text if k.call_ids == known.call_ids] or same_text[
            :-_SAME_TEXT
        ]:
            same_text.remove(old)
            self._held -= _size(old)
        same_text.append(known)
        self._known.move_to_end(key)
        self._held += _size(known)
        while self._held > _MAX_KEPT:
            _, dropped = self._known.popitem(last=False)
            self._held -= sum(map(_size, dropped))


def _size(known: KeptText) -> int:
    return _ENTRY + known.ids.itemsize * len(known.ids)


def _digest(tenant: str) -> blake2b:
    """A digest that differs between two tenants for equal texts."""
    return blake2b(digest_size=16, key=tenant.encode())


def _best(same_text: list[KeptText], call_ids: tuple[str, ...]) -> KeptText:
    fits = (k for k in reversed(same_text) if k.call_ids == call_ids[: len(k.call_ids)])
    return next(fits, same_text[-1])


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt; `ids` are its tokens: for text that was sampled here, the sampled ones."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    text: str
    ids: list[int]
    tenant: str = ""
    images: Mapping[str, Image] = field(default_factory=dict[str, "Image"])


class ChatTemplate:
    """Renders and tokenises messages for one model. Several threads may ask for prompts.

    Raises ConfigError: the tokenizer has no chat template, or one that shows no messages.

    Args:
        tokenizer: of transformers, with a chat template.
        eos: ids of the tokens that end a turn.
        tools: how the model writes tool calls; None: recognised by the template.

    Attributes:
        image: the placeholder of an image, and the tokenizer's id of an image's tokens; None: there
            may be no images.
    """

    def __init__(self, tokenizer: Any, eos: set[int], tools: ToolFormat | None = None) -> None:
        self.tokenizer = tokenizer
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise ConfigError(
                "The model's tokenizer has no chat template, so messages can not be shown to it. "
                "Use an instruction-tuned model, or give --chat-template a file with one."
            )
        if isinstance(template, dict):
            template = "\n".join(map(str, cast(dict[str, Any], template).values()))
        self.eos = eos
        self.image: tuple[str, int] | None = None
        self._eos = {text: id_ for id_ in eos if (text := tokenizer.decode([id_]))}
        self._turn_end = re.compile("|".join(map(re.escape, self._eos)) or r"(?!)")
        self._shapes = MessageShapes(self._apply, template, self._turn_end)
        self.tools = tools or self._shapes.tools
        self._kept = KeptTokens(self._turn_end)
        self._texts: dict[int, str] = {}
        # The first one changes the tokenizer if it was saved with truncation or padding, which it
        # must not do while another thread uses it.
        self._encode("")

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        most: int | None = None,
        tenant: str = "",
        images: Mapping[str, Image] = MappingProxyType({}),
    ) -> Prompt:
        """Render, and tokenise if there are at most so many characters.

        Tokens that were sampled here are a `tenant`'s own. `images` are those that the messages
        name.

        Raises:
            InvalidRequest: a message or the tools can not be shown to this model; says which and
                why.
            PromptTooLong: there are more than `most`.
        """
        if tools and not self._shapes.shows_tools:
            raise InvalidRequest(
                f"got the tools {[tool['function']['name'] for tool in tools]}, and this model's "
                "chat template shows no tools, so the model would never see them; expected a "
                "request without tools. Start the server with --chat-template tools, which shows "
                "them as text, or with a FILE of a template that does.",
                param="tools",
            )
        text = self._render(messages, tools, reply=False)
        if most is not None and len(text) > most:
            raise PromptTooLong(
                f"The prompt is too long: got {len(text)} characters with the chat template, "
                f"expected at most {most}: more cannot fit the context. Shorten the messages or "
                "tools, or serve with a larger max_model_len.",
                param="messages",
            )
        call_ids = _call_ids(messages)
        for mark, after, known in self._kept.beginnings(text, call_ids, tenant):
            rest = self._encode_rest(text, mark, after, images)
            if rest is not None:
                return Prompt(messages, tools, text, [*known.ids, *rest], tenant, images)
        return Prompt(messages, tools, text, self._encode(text, images), tenant, images)

    def reply_ids(self, prompt: Prompt, reply: dict[str, Any]) -> list[int]:
        """The tokens of a reply as if it had been sampled after `prompt`, its end included.

        They are what the template adds to the prompt for the reply, up to the end-of-turn token.

        Raises InvalidRequest: the template renders the prompt differently with the reply than
        without it, adds more than one turn, or does not end the turn with an end-of-turn token.
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

    def may_call(self, request: ChatRequest) -> bool:
        """True if the reply to a request may have tool calls.

        Raises InvalidRequest: no format is known for calls of this model.
        """
        if not request.tools or request.tool_choice == "none":
            return False
        if self.tools is None:
            raise InvalidRequest(
                f"got tools with tool_choice={request.tool_choice!r}, and this model's chat "
                f"template {self._shapes.unknown}; expected one of these formats: "
                f"{names_of(FORMATS.values())}. "
                "Start the server with --chat-template tools, which writes them as hermes; leave "
                "the tools out or set tool_choice='none'; with vLLM, `tool_format` in "
                "[sampler] names a format that the template does not show.",
                param="tools",
            )
        return True

    def recall(self, call: EarlierCall, tenant: str = "") -> None:
        """Keep the ids of a call that was sampled elsewhere, as `remember` does."""
        text = self._render(call.messages, call.tools, reply=False)
        prompt = Prompt(call.messages, call.tools, text, call.prompt_token_ids, tenant)
        self.remember(prompt, call.token_ids, call.reply)

    def remember(self, prompt: Prompt, token_ids: list[int], reply: dict[str, Any]) -> None:
        """Keep the ids of a finished call for later prompts of the same conversation.

        `reply` is the assistant message that the client will send back.
        """
        added = self.text(prompt.ids[-1:] + token_ids)[len(self.text(prompt.ids[-1:])) :]
        ids = id_array([*prompt.ids, *token_ids])
        calls = reply.get("tool_calls") or []
        call_ids = _call_ids([*prompt.messages, reply])
        self._kept.keep(prompt.text + added, KeptText(ids, call_ids), prompt.tenant)
        ended = self._turn_end.search(added)
        content = reply.get("content") or ""
        if ended is None or (not calls and added[: ended.start()] == content == content.strip()):
            return
        # The client sends back a parsed reply, which the template may write in other words: with
        # other white space, or JSON that means the same. That text is kept for the same tokens.
        shown = self._shown_later(prompt, reply)
        if shown is None:
            return
        text, end = shown
        if self._meaning(added, prompt) != self._meaning(text[len(prompt.text) :], prompt):
            return
        if end == ended.group():
            self._kept.keep(text + end, KeptText(ids, call_ids), prompt.tenant)
        else:  # a reply may end with one token, and the template write another
            self._kept.keep(text, KeptText(ids[:-1], call_ids), prompt.tenant)

    def _shown_later(self, prompt: Prompt, reply: dict[str, Any]) -> tuple[str, str] | None:
        """The text up to the end of a reply, and what ends it, once the next turn follows.

        None if the template refuses it, or shows what is before the reply in other words.
        """
        calls = reply.get("tool_calls") or []
        follow: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": c["id"], "name": c["function"]["name"]} for c in calls
        ] or [{"role": "user"}]
        follow = [message | {"content": _NEXT_TURN} for message in follow]
        try:
            text = self._render([*prompt.messages, reply, *follow], prompt.tools, reply=True)
        except InvalidRequest:
            return None
        start = len(prompt.text)
        ends = list(self._turn_end.finditer(text, start, max(start, text.find(_NEXT_TURN, start))))
        if not ends or not text.startswith(prompt.text):
            return None
        return text[: ends[-1].start()], ends[-1].group()

    def _meaning(self, text: str, prompt: Prompt) -> tuple[list[str], list[Any]]:
        """A reply without its white space and the notation of its calls."""
        parser = ToolCallParser(self.tools, prompt.tools, calls=bool(prompt.tools))
        parser.feed(self._hidden_text.sub("", self._turn_end.split(text)[0]), last=True)
        functions = [call["function"] for call in parser.calls]
        calls = [(f["name"], arguments_object(f["arguments"])) for f in functions]
        return parser.content.split(), calls

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, reply: bool
    ) -> str:
        shaped = [self._shapes.shaped(i, m, tools=bool(tools)) for i, m in enumerate(messages)]
        try:
            text = self._apply(shaped, tools, reply=reply)
        except RENDER_ERRORS as error:
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
        return self._named(text, names) if (names := image_names(messages)) else text

    def _named(self, text: str, names: list[str]) -> str:
        """A text with the name of each image behind its placeholder: other images, other text."""
        placeholder = self.image[0] if self.image else ""
        if self.image is None or text.count(placeholder) != len(names):
            raise InvalidRequest(
                f"got {len(names)} images, and the text with this model's chat template has "
                f"{text.count(placeholder)} of {placeholder!r}; expected as many. A message's text "
                "may not have it, and not every role may have an image."
                if self.image
                else "got an image where none can be tokenised: replies that are given, as "
                "demonstrations and corrections, may answer text alone.",
                param="messages",
            )
        first, *rest = text.split(placeholder)
        marked = (f"{placeholder}#{name}{part}" for name, part in zip(names, rest, strict=True))
        return first + "".join(marked)

    def _apply(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, reply: bool
    ) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=not reply, tokenize=False
        )

    def _encode_rest(
        self, text: str, mark: re.Match[str], after: bool, images: Mapping[str, Image]
    ) -> list[int] | None:
        """Tokenise what follows a kept beginning.

        Tokenised from the end-of-turn token `mark` on, which is dropped if it belongs to the kept
        part. None if the tokenizer does not give that token.
        """
        ids = self._encode(text[mark.start() :], images)
        try:
            at = ids.index(self._eos[mark.group()])
        except ValueError:
            return None
        return ids[at + after :]

    def _encode(self, text: str, images: Mapping[str, Image] = MappingProxyType({})) -> list[int]:
        if not images or self.image is None:
            return self.tokenizer.encode(text, add_special_tokens=False)
        placeholder, token = self.image
        first, *rest = text.split(placeholder)
        shown = [images[part[1 : 1 + _NAME]] for part in rest]
        written = (one.text + part[1 + _NAME :] for one, part in zip(shown, rest, strict=True))
        ids = self._encode(first + "".join(written))
        places = [at for at, id_ in enumerate(ids) if id_ == token]
        own = [id_ for one in shown for id_ in one.ids]
        if len(places) != len(own):
            raise InvalidRequest(
                f"got messages with {len(places)} tokens of images, expected {len(own)}: leave "
                f"{self.token_text(token)!r} out of their text.",
                param="messages",
            )
        for at, id_ in zip(places, own, strict=True):
            ids[at] = id_
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        decode = partial(
            self.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        text = decode(ids)
        return decode(self._as_utf8(ids)) if _REPLACED in text and self._bytes else text

    def _as_utf8(self, ids: Sequence[int]) -> list[int]:
        """The same text as UTF-8, where tokens are single bytes.

        Of a run of them that is not UTF-8, the tokenizer replaces each byte: what a stream has sent
        would change with the bytes that follow.
        """
        shown: list[int] = []
        for is_byte, run in itertools.groupby(ids, self._bytes.__contains__):
            if is_byte:
                text = bytes(self._bytes[one] for one in run).decode(errors="replace")
                shown += [self._of_bytes[byte] for byte in text.encode()]
            else:
                shown += run
        return shown

    @cached_property
    def _bytes(self) -> dict[int, int]:
        known = self.tokenizer.get_vocab()
        ids = [known.get(f"<0x{byte:02X}>") for byte in range(256)]
        return {} if None in ids else {id_: byte for byte, id_ in enumerate(ids)}

    @cached_property
    def _of_bytes(self) -> dict[int, int]:
        return {byte: id_ for id_, byte in self._bytes.items()}

    def reply_text(self, ids: Sequence[int]) -> str:
        """The text of `ids` as a client reads it: of special tokens, only those of tool calls."""
        return self.text([id_ for id_ in ids if id_ not in self._hidden])

    @cached_property
    def _hidden_text(self) -> re.Pattern[str]:
        texts = sorted((self.text([id_]) for id_ in self._hidden), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, filter(None, texts))) or r"(?!)")

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


def image_names(messages: Sequence[dict[str, Any]]) -> list[str]:
    """The SHA-256 of each image that messages name, in their order."""
    contents = (message.get("content") for message in messages)
    parts = (part for one in contents if isinstance(one, list) for part in cast(list[Any], one))
    return [part["sha256"] for part in parts if isinstance(part, dict) and "sha256" in part]


def _call_ids(messages: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(
        str(call.get("id")) for message in messages for call in message.get("tool_calls") or ()
    )
