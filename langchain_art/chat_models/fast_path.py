"""Chat completions without the costly parts of the OpenAI SDK and of LangChain.

The SDK checks each field of a request against its types, and builds typed objects from the reply.
That takes more CPU time than the rest of a call, and LangChain needs none of it: it converts JSON
to messages itself. Here, replies and chunks stay JSON. Whole replies are requested through
`http_post`, with the URL, headers, time limits and retry rules of the SDK's client. The SDK sends
everything else: streams, calls through proxies and calls through HTTP clients that the user set.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, Generic, Self, TypeAlias, TypeVar, cast

import openai
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult
from langchain_openai.chat_models.base import (
    BaseChatOpenAI,
    _handle_openai_api_error,  # pyright: ignore[reportPrivateUsage]
    _handle_openai_bad_request,  # pyright: ignore[reportPrivateUsage]
)
from openai._models import FinalRequestOptions
from pydantic import SecretStr, model_validator
from pydantic_core import from_json, to_json

from langchain_art.call_seeds import run_seed
from langchain_art.chat_models import http_pools
from langchain_art.chat_models.http_pools import httpx
from langchain_art.chat_models.http_post import POST_ERRORS, Answer, Connections, Target, post_async
from langchain_art.errors import OF_OUR_CALL
from langchain_art.wire.base_urls import foreign_answer, no_answer

_PATH = "chat/completions"
#: Arguments of the SDK's `create` that are not fields of the body. Calls with them use the SDK.
_OPTIONS = {"extra_headers": "headers", "extra_query": "params", "timeout": "timeout"}
#: The SDK's view of a request, without options of its own.
_SDK_REQUEST = FinalRequestOptions(method="post", url=f"/{_PATH}")
#: Fields of a chat model that hold its clients, which are built from the other fields.
_CLIENT_FIELDS = ("client", "async_client", "root_client", "root_async_client")

#: What became of a request: an answer, or an exception.
Outcome: TypeAlias = Answer | Exception

_connections = Connections()

Client = TypeVar("Client", openai.OpenAI, openai.AsyncOpenAI)


class FastChatOpenAI(BaseChatOpenAI):
    """LangChain's OpenAI chat model, with `Completions` in place of the SDK's.

    The SDK sends all calls if the user set an HTTP client, a proxy, socket options, or a function
    as API key.
    """

    @model_validator(mode="before")
    @classmethod
    def _use_shared_clients(cls, values: dict[str, Any]) -> Any:
        if isinstance(values.get("client"), Completions):  # `configurable_fields` copies a model
            values = {name: value for name, value in values.items() if name not in _CLIENT_FIELDS}
        if values.get("openai_proxy") or values.get("http_socket_options") is not None:
            return values
        shared = {"http_client": http_pools.client, "http_async_client": http_pools.async_client}
        return {**values, **{name: values.get(name) or one for name, one in shared.items()}}

    @model_validator(mode="after")
    def _use_fast_completions(self) -> Self:
        constant_key = isinstance(self.openai_api_key, SecretStr)
        if self.root_client is not None:
            shared = self.http_client is http_pools.client
            self.client = Completions(self.root_client, direct=shared and constant_key)
        if self.root_async_client is not None:
            shared = self.http_async_client is http_pools.async_client
            self.async_client = AsyncCompletions(
                self.root_async_client, direct=shared and constant_key
            )
        return self

    def _dict_for_compat(self) -> dict[str, Any]:
        # The parent calls the deprecated `dict` instead, and switches its warning off meanwhile:
        # twice in each call, for the whole process.
        return self.asdict()

    def _should_stream(self, *, run_manager: Any = None, **kwargs: Any) -> bool:
        # The parent asks whether a handler is of the protocol of those that stream, in each call.
        # That protocol has this method, and to look for it takes a twentieth of the time.
        handlers = run_manager.handlers if run_manager else ()
        if not any(hasattr(handler, "tap_output_aiter") for handler in handlers):
            run_manager = None
        return super()._should_stream(run_manager=run_manager, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        self._ensure_sync_client_available()
        payload = self._get_request_payload(messages, stop=stop, **kwargs)
        with _as_langchain_errors():
            reply = self.client.with_raw_response.create(**payload)
        return self._result(reply)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # The parent converts the reply in a thread, and the switch costs more than the conversion.
        payload = self._get_request_payload(messages, stop=stop, **kwargs)
        with _as_langchain_errors():
            reply = await self.async_client.with_raw_response.create(**payload)
        return self._result(reply)

    def _result(self, reply: RawReply) -> ChatResult:
        headers = {"headers": dict(reply.headers)} if self.include_response_headers else None
        return self._create_chat_result(reply.parse(), headers)

    # LangChain looks in each call whether they take a `run_manager`. Computed once, it is at hand.
    for _method in (_generate, _agenerate):
        _method.__signature__ = inspect.signature(_method)  # pyright: ignore[reportFunctionMemberAccess]
    del _method


class RawReply:
    """Part of the SDK's raw responses that LangChain uses."""

    def __init__(self, answer: Answer | httpx.Response, parsed: Any) -> None:
        self._answer, self._parsed = answer, parsed

    @property
    def http_response(self) -> httpx.Response:
        """The answer as the SDK has it."""
        return self._answer.response if isinstance(self._answer, Answer) else self._answer

    @property
    def headers(self) -> httpx.Headers:
        """The answer's headers."""
        return self.http_response.headers

    def parse(self) -> Any:
        """The reply, or the stream of chunks."""
        return self._parsed


class _Completions(ABC, Generic[Client]):
    """Takes the place of ``client.chat.completions``: replies, or streams of chunks, as JSON.

    `direct` says whether whole replies are requested without the SDK.
    """

    def __init__(self, client: Client, *, direct: bool) -> None:
        self._client, self._direct = client, direct
        self._target: Target | None = None
        self._key = ""
        self.with_raw_response = SimpleNamespace(create=self._create_raw)

    @abstractmethod
    def _create_raw(self, **payload: Any) -> Any:
        """A `RawReply`, or a coroutine of one."""

    def _direct_target(self, payload: Mapping[str, Any]) -> Target | None:
        """Target to post the call to; None if the SDK is to send it."""
        if not self._direct or not _OPTIONS.keys().isdisjoint(payload):
            return None
        if self._target is None or self._key != self._client.api_key:
            self._target, self._key = _target(self._client), self._client.api_key
        scheme, host, _ = self._target.server
        return self._target if http_pools.proxy(scheme, host) is None else None

    def _delay(self, outcome: Outcome, retries_taken: int, target: Target) -> float:
        """Seconds to wait before the next attempt. Raises the SDK's error if there is none."""
        rules = cast(Any, self._client)  # the SDK's rules are not public
        left = self._client.max_retries - retries_taken
        if isinstance(outcome, Answer):
            response = outcome.response
            if left <= 0 or not rules._should_retry(response):
                raise rules._make_status_error_from_response(response)
            return rules._calculate_retry_timeout(left, _SDK_REQUEST, response.headers)
        if left <= 0:
            timed_out = isinstance(outcome, TimeoutError)
            kind = openai.APITimeoutError if timed_out else openai.APIConnectionError
            raise kind(request=target.request) from outcome
        return rules._calculate_retry_timeout(left, _SDK_REQUEST)


class _Stream(openai.Stream[object]):
    def __stream__(self) -> Iterator[object]:
        with _as_our_errors(self._client):
            yield from super().__stream__()


class _AsyncStream(openai.AsyncStream[object]):
    async def __stream__(self) -> AsyncIterator[object]:
        with _as_our_errors(self._client):
            async with aclosing(cast(Any, super().__stream__())) as chunks:
                async for chunk in chunks:
                    yield chunk


class Completions(_Completions[openai.OpenAI]):
    """Synchronous calls."""

    def create(self, **payload: Any) -> Any:
        """A reply, or a stream of chunks."""
        return self._create_raw(**payload).parse()

    def _create_raw(self, **payload: Any) -> RawReply:
        with _as_our_errors(self._client), _seeded(payload):
            return self._send(payload)

    def _send(self, payload: dict[str, Any]) -> RawReply:
        if payload.get("stream"):
            stream = self._client.post(f"/{_PATH}", **_arguments(payload, _Stream))
            return RawReply(stream.response, stream)
        target = self._direct_target(payload)
        answer = None if target is None else self._post(target, to_json(_body(payload)))
        return _reply(answer or self._client.post(f"/{_PATH}", **_arguments(payload)))

    def _post(self, target: Target, body: bytes) -> Answer | None:
        for retries_taken in count():
            try:
                outcome: Outcome = _connections.post(target.retry(retries_taken), body)
            except POST_ERRORS as error:
                outcome = error
            if isinstance(outcome, Answer) and outcome.status < 400:
                return outcome if outcome.is_success else None  # the SDK follows redirects
            time.sleep(self._delay(outcome, retries_taken, target))
        return None


class AsyncCompletions(_Completions[openai.AsyncOpenAI]):
    """Asynchronous counterpart of `Completions`."""

    async def create(self, **payload: Any) -> Any:
        """A reply, or a stream of chunks."""
        return (await self._create_raw(**payload)).parse()

    async def _create_raw(self, **payload: Any) -> RawReply:
        with _as_our_errors(self._client), _seeded(payload):
            return await self._send(payload)

    async def _send(self, payload: dict[str, Any]) -> RawReply:
        if payload.get("stream"):
            stream = await self._client.post(f"/{_PATH}", **_arguments(payload, _AsyncStream))
            return RawReply(stream.response, stream)
        target = self._direct_target(payload)
        answer = None if target is None else await self._post(target, to_json(_body(payload)))
        return _reply(answer or await self._client.post(f"/{_PATH}", **_arguments(payload)))

    async def _post(self, target: Target, body: bytes) -> Answer | None:
        for retries_taken in count():
            try:
                outcome: Outcome = await post_async(target.retry(retries_taken), body)
            except POST_ERRORS as error:
                outcome = error
            if isinstance(outcome, Answer) and outcome.status < 400:
                return outcome if outcome.is_success else None  # the SDK follows redirects
            await asyncio.sleep(self._delay(outcome, retries_taken, target))
        return None


@contextmanager
def _as_langchain_errors() -> Generator[None]:
    try:
        yield
    except openai.BadRequestError as error:
        _handle_openai_bad_request(error)
        raise
    except openai.APIError as error:
        _handle_openai_api_error(error)
        raise


@contextmanager
def _as_our_errors(client: openai.OpenAI | openai.AsyncOpenAI) -> Generator[None]:
    """Marks the SDK's errors, which say which server it is and what to do next; their types stay.

    Of a server that did not answer, the SDK says "Connection error."; of a foreign one, its page.
    """
    try:
        yield
    except (openai.APIError, httpx.TransportError) as error:
        setattr(error, OF_OUR_CALL, True)
        if isinstance(error, openai.APITimeoutError):
            pass  # the server is there
        elif isinstance(error, openai.APIConnectionError):
            why = error.__cause__ or error
            where = str(client.base_url).rstrip("/")
            _reword(error, no_answer(where, f"{type(why).__name__}: {why}"))
        elif isinstance(error, openai.APIStatusError):
            answer = error.response
            if not (isinstance(error.body, dict) and "message" in error.body):
                kind = answer.headers.get("content-type")
                _reword(error, foreign_answer(answer.url, answer.status_code, kind, answer.text))
        raise


@contextmanager
def _seeded(payload: dict[str, Any]) -> Generator[None]:
    """Gives a request the seed that its run has for it, if there is such a run."""
    if (seed := run_seed.get()) is None:
        yield
        return
    tags = (payload.get("extra_body") or {}).get("art") or {}
    with seed.seeding(payload, tags.get("path", ())):
        yield


def _reword(error: openai.APIError, words: str) -> None:
    error.message, error.args = words, (words,)


def _target(client: openai.OpenAI | openai.AsyncOpenAI) -> Target:
    request = client._build_request(_SDK_REQUEST)  # pyright: ignore[reportPrivateUsage]
    sent = {name: value for name, value in request.headers.items() if name != "content-length"}
    limits = request.extensions["timeout"]
    return Target(httpx.Request("POST", request.url), sent, limits["connect"], limits["read"])


def _body(payload: Mapping[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in payload.items() if name not in _OPTIONS}
    body |= body.pop("extra_body", None) or {}
    return body


def _arguments(payload: Mapping[str, Any], stream: type | None = None) -> dict[str, Any]:
    """The arguments of the SDK's `post`, from those of its `create`; `stream` is of chunks."""
    given = {_OPTIONS[name]: payload[name] for name in _OPTIONS if name in payload}
    kind = {"cast_to": object, "stream": True, "stream_cls": stream}
    answer = {"cast_to": httpx.Response} if stream is None else kind
    return {"body": _body(payload), "options": given, **answer}


def _reply(answer: Answer | httpx.Response) -> RawReply:
    """A whole reply. Raises APIResponseValidationError if it is not JSON."""
    try:
        return RawReply(answer, from_json(answer.content))
    except ValueError as error:
        response = RawReply(answer, None).http_response
        kind = response.headers.get("content-type")
        raise openai.APIResponseValidationError(
            response=response,
            body=response.text,
            message=foreign_answer(response.url, response.status_code, kind, response.text),
        ) from error
