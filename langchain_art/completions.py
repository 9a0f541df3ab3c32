"""The SDK's chat completions without what LangChain has no use for.

LangChain turns a reply into messages itself. The SDK before it checks every field of the request
against its types and builds typed objects from the reply, which costs more CPU than all the rest of
a call. Here a reply, and each chunk of a stream, stays the JSON that it is; and the first attempt
at a whole reply goes out past the SDK, with the URL, headers and time limits of the SDK's requests.
If it fails, the SDK goes on from there as if it had made that attempt (`connections.told`): so
retries, `Retry-After` and errors are the SDK's, as streams are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import openai
from pydantic_core import from_json, to_json

from langchain_art.connections import Outcome, httpx

_PATH = "/chat/completions"
#: Arguments of the SDK's `create` that are not the body's: calls with them are the SDK's.
_OPTIONS = {"extra_headers": "headers", "extra_query": "params", "timeout": "timeout"}

Reply: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class _Head:
    """A request of the SDK, without its body."""

    url: httpx.URL
    headers: list[tuple[bytes, bytes]]
    extensions: dict[str, Any]
    api_key: str

    def request(self, payload: Mapping[str, Any]) -> httpx.Request:
        content = to_json(_body(payload))
        return httpx.Request(
            "POST", self.url, headers=self.headers, content=content, extensions=self.extensions
        )


class _Draft(httpx.MockTransport):
    """Keeps the request that the SDK would send, and sends nothing."""

    def __init__(self) -> None:
        super().__init__(self._keep)

    def _keep(self, request: httpx.Request) -> httpx.Response:
        self._request = request
        return httpx.Response(200)

    def head(self, api_key: str) -> _Head:
        request = self._request
        kept = [(k, v) for k, v in request.headers.raw if k.lower() != b"content-length"]
        return _Head(request.url, kept, request.extensions, api_key)


class _Raw:
    """What LangChain asks of the SDK's raw responses."""

    def __init__(self, response: httpx.Response, parsed: Any) -> None:
        self.http_response = response
        self.headers = response.headers
        self._parsed = parsed

    def parse(self) -> Any:
        return self._parsed


class Completions:
    """Stands where LangChain expects ``client.chat.completions``.

    Args:
        client: the SDK's.
        transport: what its HTTP client sends with, for attempts past the SDK; None where all calls
            are the SDK's: the user brought a client, or a key that changes.
    """

    def __init__(self, client: openai.OpenAI, transport: httpx.BaseTransport | None) -> None:
        self._client, self._transport = client, transport
        self._head: _Head | None = None

    @property
    def with_raw_response(self) -> _RawCompletions:
        """The same, with headers."""
        return _RawCompletions(self._client)

    def create(self, **payload: Any) -> Any:
        """A reply, or a stream of chunks, as JSON."""
        return self.with_raw_response.create(**payload).parse()

    def attempt(self, payload: Mapping[str, Any]) -> Reply | Outcome | None:
        """One attempt past the SDK.

        Returns:
            The reply; or what came instead; or None if the call is the SDK's.
        """
        if self._transport is None or not _OPTIONS.keys().isdisjoint(payload):
            return None
        if self._head is None or self._head.api_key != self._client.api_key:
            draft = _Draft()
            with httpx.Client(transport=draft, trust_env=False) as http_client:
                sdk = self._client.with_options(http_client=http_client)
                sdk.post(_PATH, cast_to=httpx.Response, body={})
            self._head = draft.head(self._client.api_key)
        request = self._head.request(payload)
        try:
            response = self._transport.handle_request(request)
            try:
                response.read()
            finally:
                response.close()
        except Exception as error:  # noqa: BLE001 - the SDK judges it
            return error
        return _outcome(response, request)


class _RawCompletions:
    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client

    def create(self, **payload: Any) -> _Raw:
        if payload.get("stream"):
            stream = self._client.post(
                _PATH,
                **_arguments(payload),
                cast_to=cast("type[Any]", object),
                stream=True,
                stream_cls=openai.Stream[object],
            )
            return _Raw(stream.response, stream)
        response = self._client.post(_PATH, **_arguments(payload), cast_to=httpx.Response)
        return _Raw(response, _parse(response))


class AsyncCompletions:
    """Stands where LangChain expects the asynchronous ``client.chat.completions``.

    Args:
        client: the SDK's.
        transport: as for `Completions`.
    """

    def __init__(
        self, client: openai.AsyncOpenAI, transport: httpx.AsyncBaseTransport | None
    ) -> None:
        self._client, self._transport = client, transport
        self._head: _Head | None = None

    @property
    def with_raw_response(self) -> _AsyncRawCompletions:
        """The same, with headers."""
        return _AsyncRawCompletions(self._client)

    async def create(self, **payload: Any) -> Any:
        """A reply, or a stream of chunks, as JSON."""
        return (await self.with_raw_response.create(**payload)).parse()

    async def attempt(self, payload: Mapping[str, Any]) -> Reply | Outcome | None:
        """As `Completions.attempt`."""
        if self._transport is None or not _OPTIONS.keys().isdisjoint(payload):
            return None
        if self._head is None or self._head.api_key != self._client.api_key:
            draft = _Draft()
            async with httpx.AsyncClient(transport=draft, trust_env=False) as http_client:
                sdk = self._client.with_options(http_client=http_client)
                await sdk.post(_PATH, cast_to=httpx.Response, body={})
            self._head = draft.head(self._client.api_key)
        request = self._head.request(payload)
        try:
            response = await self._transport.handle_async_request(request)
            try:
                await response.aread()
            finally:
                await response.aclose()
        except Exception as error:  # noqa: BLE001 - the SDK judges it
            return error
        return _outcome(response, request)


class _AsyncRawCompletions:
    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client

    async def create(self, **payload: Any) -> _Raw:
        if payload.get("stream"):
            stream = await self._client.post(
                _PATH,
                **_arguments(payload),
                cast_to=cast("type[Any]", object),
                stream=True,
                stream_cls=openai.AsyncStream[object],
            )
            return _Raw(stream.response, stream)
        response = await self._client.post(_PATH, **_arguments(payload), cast_to=httpx.Response)
        return _Raw(response, _parse(response))


def _body(payload: Mapping[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in payload.items() if name not in _OPTIONS}
    body |= body.pop("extra_body", None) or {}
    return body


def _arguments(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The SDK's `post` arguments for the arguments of its `create`."""
    given = {_OPTIONS[name]: payload[name] for name in _OPTIONS if name in payload}
    return {"body": _body(payload), "options": given}


def _outcome(response: httpx.Response, request: httpx.Request) -> Reply | Outcome:
    response.request = request
    if response.is_success:
        return _parse(response)
    # Read and decoded: what says how it was coded would have it decoded again.
    headers = [(k, v) for k, v in response.headers.raw if k.lower() != b"content-encoding"]
    return httpx.Response(response.status_code, headers=headers, content=response.content)


def _parse(response: httpx.Response) -> Reply:
    try:
        return from_json(response.content)
    except ValueError as error:
        kind = response.headers.get("content-type")
        raise openai.APIResponseValidationError(
            response=response,
            body=response.text,
            message=f"{response.url} answered {kind or 'no content type'}, expected JSON: is "
            f"`base_url` a langchain-art server's, with /v1? {response.text[:200]!r}",
        ) from error
