"""`ChatART`: a LangChain chat model whose server keeps the sampled tokens."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import openai
from langchain_core.callbacks import BaseCallbackManager
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import AfterValidator, ConfigDict, Field, SecretStr, model_validator

from langchain_art._version import __version__
from langchain_art.call_tags import METADATA_TAGGER, current_tags
from langchain_art.chat_models import structured_output
from langchain_art.chat_models.fast_path import FastChatOpenAI
from langchain_art.errors import ConfigError
from langchain_art.text_messages import text_message
from langchain_art.wire.base_urls import DEFAULT_BASE_URL, with_v1


class ChatART(FastChatOpenAI):
    r"""Chat model of a langchain-art server: sampled by a policy that training improves.

    It is any other chat model to a graph. The server keeps each call's exact tokens under the
    completion's id; a message carries only that id, so states and checkpoints stay small.

    Install ``langchain-art``, start a server (``langchain-art serve``) and say where it is:

    .. code-block:: bash

        export ART_BASE_URL="http://gpu-box:8000/v1"
        export ART_API_KEY="..."

    Main parameters:

    - ``model`` (str): a policy (``email-agent``: its newest version), a version of it
      (``email-agent@17``), or the server's base model.
    - ``temperature`` (float or None): None leaves it to the server, which takes 1.0.
    - ``max_tokens`` (int or None): most tokens of a reply; None leaves it to the server.
    - ``base_url`` (str): the server's address; ``/v1`` at its end is added if it is missing.
      Default: the environment variable ART_BASE_URL, else ``http://localhost:8000/v1``.
    - ``api_key`` (SecretStr): default: the environment variable ART_API_KEY, else ``EMPTY``.
    - ``timeout`` (float or None): seconds to wait for an answer; None, the default, waits as long
      as it takes: a server with one GPU pauses sampling while it trains.
    - ``max_retries`` (int or None): retries of requests that the server could not take (429, 5xx,
      no connection); None means the OpenAI SDK's default of 2.

    Structured output that was cut off does not parse, and raises `OutputParserException` unless
    ``include_raw=True``; the call itself never fails for it, so the sample is not lost.

    Examples::

        model = ChatART(model="email-agent", temperature=1.0)
        model.invoke([("system", "Answer briefly."), ("user", "When did Ann write?")])
        await model.abatch(["one", "two"])
        for chunk in model.stream("When did Ann write?"):
            print(chunk.text, end="")
        model.bind_tools([search_inbox]).invoke("Find Ann's mail").tool_calls
        model.with_structured_output(Answer).invoke("When did Ann write?")
        model.invoke("Hi").usage_metadata
        # {'input_tokens': 9, 'output_tokens': 5, 'total_tokens': 14}
        model.invoke("Hi").response_metadata
        # {'call_id': 'chatcmpl-…', 'model_name': 'email-agent@17', 'model_provider': 'art', …}
    """

    model_name: str = Field(alias="model")
    openai_api_key: SecretStr | Callable[[], str] | Callable[[], Any] | None = Field(
        alias="api_key", default_factory=lambda: SecretStr(os.environ.get("ART_API_KEY") or "EMPTY")
    )
    openai_api_base: Annotated[str | None, AfterValidator(with_v1)] = Field(
        alias="base_url",
        default_factory=lambda: os.environ.get("ART_BASE_URL") or DEFAULT_BASE_URL,
        validate_default=True,
    )
    openai_proxy: str | None = None  # OPENAI_PROXY is not meant for this server
    stream_usage: bool | None = True
    use_responses_api: bool | None = False
    stream_chunk_timeout: float | None = None  # sampling pauses during training
    cache: Any = Field(default=False, exclude=True)  # a cached reply is no sample of the policy

    model_config = ConfigDict(populate_by_name=True)

    @property
    def _llm_type(self) -> str:
        return "chat-art"

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Fields that are never written out, and the environment variable that holds them."""
        return {"openai_api_key": "ART_API_KEY"}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """True: LangChain's `dumps` writes its settings out, without the API key."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """The class's path in LangChain's serialization."""
        return ["langchain_art", "chat_models"]

    @model_validator(mode="before")
    @classmethod
    def validate_temperature(cls, values: dict[str, Any]) -> Any:
        """Keeps the temperature, which the parent drops for names that begin like OpenAI's."""
        return values

    @model_validator(mode="after")
    def _tag_own_calls(self) -> Self:
        if isinstance(self.callbacks, BaseCallbackManager):
            self.callbacks = self.callbacks.copy()
            self.callbacks.add_handler(METADATA_TAGGER, inherit=False)
        elif METADATA_TAGGER not in (self.callbacks or ()):
            self.callbacks = [*(self.callbacks or ()), METADATA_TAGGER]
        return self

    @model_validator(mode="after")
    def _set_art_version(self) -> Self:
        self._add_version("langchain-art", __version__)
        return self

    def _use_responses_api(self, payload: dict[str, Any]) -> bool:
        return False

    def _resolve_model_profile(self) -> ModelProfile | None:
        return ModelProfile(tool_calling=True, tool_choice=True, structured_output=True)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "art"
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Raises NotImplementedError: LangChain would take OpenAI's tokenizer, from the network."""
        raise NotImplementedError(
            "the token ids of a text are known to the server alone, which keeps those of each call "
            "(ArtClient.call). `get_num_tokens` says about how many a text has."
        )

    def get_num_tokens(self, text: str) -> int:
        """Estimate the tokens of `text`; the tokenizer is the server's."""
        return count_tokens_approximately([text])

    def get_num_tokens_from_messages(
        self,
        messages: Sequence[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
        **kwargs: Any,
    ) -> int:
        """Estimate the tokens of a prompt; the tokenizer is the server's."""
        schemas: list[BaseTool | dict[str, Any]] = [
            structured_output.openai_tool(t) for t in tools or ()
        ]
        return count_tokens_approximately(messages, tools=schemas)

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        messages = self._convert_input(input_).to_messages()
        texts = [text_message(message) for message in messages]
        others = [message for message, text in zip(messages, texts, strict=True) if text is None]
        payload: dict[str, Any] = super()._get_request_payload(others, stop=stop, **kwargs)
        for message, sent in zip(others, payload["messages"], strict=True):
            if isinstance(message, AIMessage):
                _complete_reply(sent, message)
        converted = iter(payload["messages"])
        payload["messages"] = [text or next(converted) for text in texts]
        # `bind(extra_body=…)` replaces the field's value in the payload; both are meant.
        own, bound = self.extra_body or {}, payload.get("extra_body") or {}
        extra: dict[str, Any] = {**own, **bound}
        if tags := {**current_tags(), **own.get("art", {}), **bound.get("art", {})}:
            extra["art"] = tags
        if (schema := payload.pop("response_format", None)) is not None:
            # As a parameter it would select the SDK's parser, which raises on cut-off replies.
            extra["response_format"] = structured_output.response_format(schema)
        if extra:
            payload["extra_body"] = extra
        return payload

    def _create_chat_result(
        self,
        response: dict[str, Any] | openai.BaseModel,
        generation_info: dict[str, Any] | None = None,
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        raw = response if isinstance(response, dict) else response.model_dump(warnings=False)
        output = result.llm_output = {**(result.llm_output or {}), "model_provider": "art"}
        for generation, choice in zip(result.generations, raw["choices"], strict=True):
            index: int = choice.get("index") or 0
            metadata = generation.message.response_metadata
            metadata["model_provider"] = "art"
            metadata["model_name"] = output["model_name"]
            if id_ := raw.get("id"):
                metadata["call_id"] = id_ if index == 0 else f"{id_}:{index}"
            _keep_reasoning(generation.message, choice["message"])
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], *args: Any, **kwargs: Any
    ) -> ChatGenerationChunk | None:
        generation = super()._convert_chunk_to_generation_chunk(chunk, *args, **kwargs)
        if generation is None:
            return None
        metadata = generation.message.response_metadata
        metadata |= {"model_provider": "art", "call_id": chunk.get("id")}
        metadata["model_name"] = chunk.get("model") or self.model_name
        if generation.generation_info:
            generation.generation_info.pop("model_name", None)
        if choices := chunk.get("choices"):
            _keep_reasoning(generation.message, choices[0].get("delta") or {})
        return generation

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        self._refuse_choices(kwargs.get("n", self.n))
        first = True
        for chunk in super()._stream(*args, **kwargs):
            yield chunk if first else _without_names(chunk)
            first = False

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        self._refuse_choices(kwargs.get("n", self.n))
        first = True
        async for chunk in super()._astream(*args, **kwargs):
            yield chunk if first else _without_names(chunk)
            first = False

    def _refuse_choices(self, n: int | None) -> None:
        # The parent would join the texts of all choices into one reply.
        if n is not None and n > 1:
            raise ConfigError(
                f"got n={n} and a stream, expected n=1: a stream is one reply. Use `generate`, or "
                "set `disable_streaming=True` where it is a graph's stream mode that streams."
            )

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind tools as LangChain does, with the whole schemas of recursive arguments."""
        whole = [
            tool
            if getattr(tool, "extras", None)
            else structured_output.openai_tool(tool, strict=strict)
            for tool in tools
        ]
        return super().bind_tools(whole, tool_choice=tool_choice, strict=strict, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        tools: list[Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A model that answers in the form of `schema`.

        Args:
            schema: a pydantic class, a `TypedDict`, a JSON schema or an OpenAI function; pydantic
                classes give their instances, all others dicts.
            method: ``json_schema`` (default) samples under the schema's grammar;
                ``function_calling`` forces a tool call; ``json_mode`` only asks for JSON.
            include_raw: give ``{"raw", "parsed", "parsing_error"}`` and never raise over the
                reply's form.
            strict: passed on to the server beside the schema.
            tools: further tools that the model may call instead, which parses as None; with
                ``json_schema`` only.
            **kwargs: bound to each call.

        Raises:
            ValueError: no schema, where the method needs one.
        """
        if method == "json_schema" and structured_output.is_legacy(schema):
            method = "function_calling"
        if method != "json_schema" or schema is None:
            chain: Any = super().with_structured_output(
                schema, method=method, strict=strict, tools=tools, **kwargs
            )
            return structured_output.parsed(chain.first, chain.last, include_raw=include_raw)
        if tools:
            kwargs["tools"] = [structured_output.openai_tool(tool, strict=strict) for tool in tools]
        model = self.bind(
            response_format=structured_output.response_format(schema, strict),
            ls_structured_output_format={
                "kwargs": {"method": method, "strict": strict},
                "schema": structured_output.openai_tool(schema),
            },
            **kwargs,
        )
        return structured_output.parsed(
            model, structured_output.parser_of(schema), include_raw=include_raw
        )


def _complete_reply(sent: dict[str, Any], message: AIMessage) -> None:
    """Adds what the parent's conversion of an earlier reply lacks: reasoning and tool calls."""
    if reasoning := message.additional_kwargs.get("reasoning_content"):
        sent["reasoning_content"] = reasoning
    # Chat templates parse arguments as JSON, so invalid arguments are sent as a string in JSON.
    for call in (sent.get("tool_calls") or [])[len(message.tool_calls) :]:
        if message.invalid_tool_calls:
            function = call["function"]
            function["arguments"] = json.dumps({"__invalid__": function["arguments"]})


def _keep_reasoning(message: BaseMessage, said: Mapping[str, Any]) -> None:
    if reasoning := said.get("reasoning_content") or said.get("reasoning"):
        message.additional_kwargs["reasoning_content"] = reasoning


def _without_names(chunk: ChatGenerationChunk) -> ChatGenerationChunk:
    """A chunk without id and model name: merging would append them to the first chunk's."""
    for name in ("call_id", "model_name"):
        chunk.message.response_metadata.pop(name, None)
    return chunk
