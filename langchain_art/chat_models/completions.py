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
from typing import Any, TypeAlias, cast

import openai
from pydantic_core import from_json, to_json

from langchain_art.chat_models.http_pools import Outcome, httpx, proxy
from langchain_art.chat_models.kept_connections import AsyncKeptConnections, Head, KeptConnections

_PATH = "/chat/completions"
#: Arguments of the SDK's `create` that are not the body's: calls with them are the SDK's.
_OPTIONS = {"extra_headers": "headers", "extra_query": "params", "timeout": "timeout"}

Reply: TypeAlias = dict[str, Any]

_connections = KeptConnections()
_async_connections = AsyncKeptConnections()


class _Draft(httpx.MockTransport):
    """Keeps the request that the SDK would send, and sends nothing."""

    def __init__(self) -> None:
        super().__init__(self._keep)

    def _keep(self, request: httpx.Request) -> httpx.Response:
        self._request = request
        return httpx.Response(200)

    def head(self) -> Head:
        request = self._request
        headers = [(k, v) for k, v in request.headers.raw if k.lower() != b"content-length"]
        limits = request.extensions["timeout"]
        return Head(request.url, headers, limits["connect"], limits["read"])


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
        direct: whether a call may go past it; not where the user brought an HTTP client or a key
            that changes.
    """

    def __init__(self, client: openai.OpenAI, *, direct: bool) -> None:
        self._client, self._direct = client, direct
        self._head: Head | None = None
        self._key = ""

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
        if not self._direct or not _OPTIONS.keys().isdisjoint(payload):
            return None
        if self._head is None or self._key != self._client.api_key:
            draft, self._key = _Draft(), self._client.api_key
            with httpx.Client(transport=draft, trust_env=False) as http_client:
                sdk = self._client.with_options(http_client=http_client)
                sdk.post(_PATH, cast_to=httpx.Response, body={})
            self._head = draft.head()
        head = self._head
        if proxy(*head.server[:2]) is not None:
            return None
        try:
            response = _connections.post(head, to_json(_body(payload)))
        except httpx.RequestError as error:
            return error
        return _parse(response) if response.is_success else response


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
        direct: as for `Completions`.
    """

    def __init__(self, client: openai.AsyncOpenAI, *, direct: bool) -> None:
        self._client, self._direct = client, direct
        self._head: Head | None = None
        self._key = ""

    @property
    def with_raw_response(self) -> _AsyncRawCompletions:
        """The same, with headers."""
        return _AsyncRawCompletions(self._client)

    async def create(self, **payload: Any) -> Any:
        """A reply, or a stream of chunks, as JSON."""
        return (await self.with_raw_response.create(**payload)).parse()

    async def attempt(self, payload: Mapping[str, Any]) -> Reply | Outcome | None:
        """As `Completions.attempt`."""
        if not self._direct or not _OPTIONS.keys().isdisjoint(payload):
            return None
        if self._head is None or self._key != self._client.api_key:
            draft, self._key = _Draft(), self._client.api_key
            async with httpx.AsyncClient(transport=draft, trust_env=False) as http_client:
                sdk = self._client.with_options(http_client=http_client)
                await sdk.post(_PATH, cast_to=httpx.Response, body={})
            self._head = draft.head()
        head = self._head
        if proxy(*head.server[:2]) is not None:
            return None
        try:
            response = await _async_connections.post(head, to_json(_body(payload)))
        except httpx.RequestError as error:
            return error
        return _parse(response) if response.is_success else response


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


def _parse(response: httpx.Response) -> Reply:
    """The reply. Raises APIResponseValidationError if it is none."""
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
