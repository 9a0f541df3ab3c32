"""LangChain's chat model for OpenAI's dialect, on connections and completions that cost less."""

from __future__ import annotations

from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import SecretStr, model_validator

from langchain_art.chat_models import http_pools
from langchain_art.chat_models.completions import AsyncCompletions, Completions

#: What the parent makes of the other fields, unless it is given.
_MADE = ("client", "async_client", "root_client", "root_async_client")


class LeanChatOpenAI(BaseChatOpenAI):
    """Asks for whole replies past the SDK first, which goes on where that fails.

    Not where the user brought an HTTP client, a proxy, socket options or a key that is a function,
    nor where response headers are asked for: then the SDK sends all.
    """

    @model_validator(mode="before")
    @classmethod
    def _own_clients(cls, values: dict[str, Any]) -> Any:
        if isinstance(values.get("client"), Completions):  # `configurable_fields` copies a model
            values = {name: value for name, value in values.items() if name not in _MADE}
        if values.get("openai_proxy") or values.get("http_socket_options") is not None:
            return values
        own = {"http_client": http_pools.client, "http_async_client": http_pools.async_client}
        return {**values, **{name: values.get(name) or one for name, one in own.items()}}

    @model_validator(mode="after")
    def _lean_completions(self) -> Self:
        constant_key = isinstance(self.openai_api_key, SecretStr)
        if self.root_client is not None:
            ours = self.http_client is http_pools.client
            self.client = Completions(self.root_client, direct=ours and constant_key)
        if self.root_async_client is not None:
            ours = self.http_async_client is http_pools.async_client
            self.async_client = AsyncCompletions(
                self.root_async_client, direct=ours and constant_key
            )
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        outcome = None
        if isinstance(self.client, Completions) and not self.include_response_headers:
            outcome = self.client.attempt(self._get_request_payload(messages, stop=stop, **kwargs))
        if isinstance(outcome, dict):
            return self._create_chat_result(outcome)
        with http_pools.told(outcome):
            return super()._generate(messages, stop, run_manager, **kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        outcome = None
        if isinstance(self.async_client, AsyncCompletions) and not self.include_response_headers:
            payload = self._get_request_payload(messages, stop=stop, **kwargs)
            outcome = await self.async_client.attempt(payload)
        if isinstance(outcome, dict):
            return self._create_chat_result(outcome)
        with http_pools.told(outcome):
            return await super()._agenerate(messages, stop, run_manager, **kwargs)
