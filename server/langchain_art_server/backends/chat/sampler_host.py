"""Base of every sampler's child process, whichever engine samples.

A request is checked, rendered and tokenised; a reply is parsed, sent and remembered; an adapter is
freed after its last call. What takes long of this is done by threads beside the engine's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pybase64 import b64decode

from langchain_art.errors import ArtError, ConfigError, InvalidRequest, UnknownModel
from langchain_art_server.algorithms.sequences.image_tokens import IMAGE_IDS
from langchain_art_server.algorithms.sequences.token_sets import DrawnFrom
from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest, FinishReason
from langchain_art_server.backends.chat.chat_template import ChatTemplate, Prompt
from langchain_art_server.backends.chat.guided_decoding import GrammarCompiler
from langchain_art_server.backends.chat.output_processor import (
    OutputProcessor,
    reply_limit,
    why_excluded,
)
from langchain_art_server.backends.chat.tool_calls.call_format import ToolFormat
from langchain_art_server.backends.ipc.channel import Channel, EngineCall
from langchain_art_server.backends.ipc.chat_codec import pack_reply, unpack_request
from langchain_art_server.backends.models.adapter_files import LoadedAdapter
from langchain_art_server.backends.models.images import Image, Images
from langchain_art_server.backends.models.loading import LoadedModel

#: Requests of more bytes are prepared by a thread; smaller ones take a millisecond or few.
_QUICK_BYTES = 8192
#: Such threads. Each may keep a core busy for seconds, which the engine then lacks.
THREADS = 2
AdapterT = TypeVar("AdapterT", bound=LoadedAdapter)


@dataclass(eq=False)
class ChatCall(Generic[AdapterT]):
    """A chat call that is being answered.

    `limit` is the most tokens of the reply. Its `grammar` is None if it is free
    (`GrammarCompiler`).
    """

    call: EngineCall
    request: ChatRequest
    adapter: AdapterT | None
    prompt: Prompt
    limit: int
    grammar: str | None
    output: OutputProcessor


class SamplerHost(Generic[AdapterT]):
    """The part of a child process that all sampler engines share.

    `images` reads those of calls, or is the reason why they may have none.
    """

    min_temperature: ClassVar[float]
    """The lowest temperature but 0 that the engine computes exactly."""

    def __init__(
        self,
        model: LoadedModel,
        channel: Channel,
        tools: ToolFormat | None = None,
        images: Images | str = "",
    ) -> None:
        self._images = None if isinstance(images, str) else images
        no_images = images if isinstance(images, str) else ""
        self.info = replace(model.info, no_images=no_images)
        self._channel, self._eos = channel, model.eos
        self._template = ChatTemplate(model.tokenizer, model.eos, tools)
        if self._images is not None:
            self._template.image = self._images.placeholder, self._images.token
        self._token_limit = model.model.get_input_embeddings().weight.shape[0]
        self._grammars = GrammarCompiler(model.tokenizer, model.info.vocab_size, sorted(model.eos))
        self._adapters: dict[str, AdapterT] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    def _hold(self, call: EngineCall) -> AdapterT | None:
        """Count a call as a user of its adapter, which the caller releases. Raises UnknownModel."""
        if (name := call.params["adapter"]) is None:
            return None
        if (adapter := self._adapters.get(name)) is None:
            raise UnknownModel(
                f"got the adapter {name!r}, which is not loaded, expected one that is or the base "
                f"model {self.info.name!r}."
            )
        adapter.users += 1
        return adapter

    def _is_quick(self, call: EngineCall) -> bool:
        """True if `_prepare` takes so little time that the engine's loop may do it."""
        asked = call.params
        free = asked["response_format"] is None and asked["tool_choice"] in ("auto", "none")
        return free and not asked["images"] and call.size <= _QUICK_BYTES

    def _prepare(self, call: EngineCall, adapter: AdapterT | None) -> ChatCall[AdapterT]:
        """Check, render and tokenise a call, and make its grammar. Threads may do it.

        Raises:
            InvalidRequest: its messages, tools, schema or temperature are wrong.
            PromptTooLong: there is no room for a reply.
        """
        if call.cancelled:
            raise ArtError("The call was cancelled.")
        request = unpack_request(call.params)
        if not request.messages:
            raise InvalidRequest("got no messages, expected at least one.", param="messages")
        if 0.0 < (temperature := request.sampling.temperature) < self.min_temperature:
            raise InvalidRequest(
                f"got temperature={temperature}, expected 0 (greedy) or at least "
                f"{self.min_temperature}.",
                param="temperature",
            )
        template, info = self._template, self.info
        most, tenant = info.max_prompt_chars, request.tenant
        for earlier in request.earlier:
            template.recall(earlier, tenant)
        images = self._read_images(request)
        prompt = template.prompt(
            request.messages, request.tools, most=most, tenant=tenant, images=images
        )
        self._check_tokens(prompt)
        limit = reply_limit(len(prompt.ids), request.sampling.max_tokens, info.max_model_len)
        output = OutputProcessor(request, template, prompt.ids)
        grammar = self._grammars.grammar(request, template.tools)
        if grammar is not None:
            self._grammars.check(grammar)
        return ChatCall(call, request, adapter, prompt, limit, grammar, output)

    def _read_images(self, request: ChatRequest) -> dict[str, Image]:
        if not request.images:
            return {}
        if self._images is None:
            raise InvalidRequest(
                f"got an image, and none can be shown to this model: {self.info.no_images}.",
                param="messages",
            )
        return {
            name: self._images.read(name, b64decode(data, validate=True), request.tenant)
            for name, data in request.images.items()
        }

    def _check_tokens(self, prompt: Prompt) -> None:
        """Raises InvalidRequest: there is no token, or one that the model has no embedding of."""
        if not prompt.ids:
            raise InvalidRequest(
                "got messages of which the chat template makes no token, expected at least one.",
                param="messages",
            )
        if (token := max(prompt.ids)) >= IMAGE_IDS:
            token = max((one for one in prompt.ids if one < IMAGE_IDS), default=0)
        if token >= (limit := self._token_limit):
            raise InvalidRequest(
                f"got {self._template.text([token])!r} in the prompt, which is the tokenizer's "
                f"token {token}; expected one below {limit}: the model has no more. Leave it out, "
                "or serve a model with its own tokenizer.",
                param="messages",
            )

    def _stream(self, chat: ChatCall[AdapterT], delta: ChatDelta) -> None:
        if chat.request.stream and (delta.content or delta.tool_calls):
            self._send(self._channel.event, chat.call, vars(delta))

    def _finish(
        self,
        chat: ChatCall[AdapterT],
        token_ids: list[int],
        logprobs: Sequence[float],
        top: Sequence[Sequence[tuple[int, float]]],
        finish: FinishReason,
        drawn_from: DrawnFrom,
    ) -> dict[str, Any]:
        """Send the last delta, remember the reply's tokens; returns the result of the call."""
        self._stream(chat, chat.output.update(token_ids, last=True))
        request, parser, token_text = chat.request, chat.output.parser, self._template.token_text
        reply = ChatReply(
            prompt_token_ids=chat.prompt.ids,
            token_ids=token_ids,
            logprobs=logprobs,
            content=parser.content or (None if parser.calls else ""),
            tool_calls=parser.calls,
            finish_reason="tool_calls" if parser.calls and finish == "stop" else finish,
            excluded_because=why_excluded(
                request,
                drawn_from.problem,
                grammar=chat.grammar is not None,
                logprobs=logprobs,
            ),
            top_logprobs=[[(i, p, token_text(i)) for i, p in one] for one in top],
            token_texts=[token_text(i) for i in token_ids],
            drawn_from=drawn_from.packed(),
            stopped_by=chat.output.stopped,
        )
        message = {"role": "assistant", "content": reply.content, "tool_calls": reply.tool_calls}
        self._template.remember(chat.prompt, token_ids, message)
        return pack_reply(reply)

    def _send(self, send: Callable[[EngineCall, Any], None], call: EngineCall, what: Any) -> None:
        """Queue a frame by one of the channel's methods."""
        send(call, what)

    def _is_loaded(self, name: str, path: Path) -> bool:
        """True if `name` is loaded from `path`. Raises ConfigError if it is from another."""
        old = self._adapters.get(name)
        if old is not None and old.path != path:
            raise ConfigError(
                f"got {path} for the adapter {name!r}, which is loaded from {old.path}. A name is "
                "used once; publish a new version under a new name."
            )
        return old is not None

    def _retire(self, name: str) -> AdapterT | None:
        """Unload an adapter for new calls; returns it if no call uses it, to be freed now."""
        if (adapter := self._adapters.pop(name, None)) is None:
            return None
        adapter.retired = True
        return None if adapter.users else adapter

    def _release(self, adapter: AdapterT | None) -> AdapterT | None:
        """End a call on an adapter; returns it if it was its last, to be freed now."""
        if adapter is None:
            return None
        adapter.users -= 1
        return adapter if adapter.retired and not adapter.users else None
