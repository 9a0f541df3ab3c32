"""The requests of a ChatART, and what it does when a server or a connection fails.

Whole replies are requested without the OpenAI SDK. Each case runs synchronously and
asynchronously; the expectation is what the SDK does, wherever it does the same thing.
"""

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage

from langchain_art import ChatART
from langchain_art.chat_models import http_pools
from langchain_art.chat_models.http_pools import httpx
from langchain_art.errors import EngineUnavailable
from langchain_art.rollout.runner import is_server_away
from tests.support.raw_server import COMPLETION, RawServer, answer, refusal

Ask = Callable[[ChatART], AIMessage]

TEXT = 'é😀 \u2028 "quoted" \\ \x7f\n'


@pytest.fixture
def server() -> Iterator[RawServer]:
    with RawServer() as server:
        yield server


@pytest.fixture(params=["invoke", "ainvoke"])
def ask(request: pytest.FixtureRequest) -> Ask:
    if request.param == "invoke":
        return lambda model: model.invoke(TEXT)
    return lambda model: asyncio.run(model.ainvoke(TEXT))


def model_of(server: RawServer, **kwargs: Any) -> ChatART:
    return ChatART(**{"model": "m", "base_url": server.base_url, "api_key": "key", **kwargs})


def through_the_sdk(server: RawServer, **kwargs: Any) -> ChatART:
    """A model whose calls all go through the SDK, because its HTTP clients are the user's."""
    clients = {
        "http_client": httpx.Client(),
        "http_async_client": httpx.AsyncClient(),
    }
    return model_of(server, **clients, **kwargs)


def retries(server: RawServer) -> list[str]:
    return [seen.headers["x-stainless-retry-count"] for seen in server.seen]


def test_the_request_is_the_sdks(server: RawServer, ask: Ask) -> None:
    options: dict[str, Any] = {
        "default_headers": {"x-mine": "1", "user-agent": "me"},
        "default_query": {"a": "1", "b": "x y"},
        "organization": "org",
        "timeout": 7.5,
        "temperature": 0.5,
        "stop": ["\n"],
        "extra_body": {"top_k": 3},
    }
    assert ask(model_of(server, **options)).text == "yes"
    assert ask(through_the_sdk(server, **options)).text == "yes"
    ours, theirs = server.seen
    assert (ours.target, ours.body) == (theirs.target, theirs.body)
    assert ours.body["messages"] == [{"role": "user", "content": TEXT}]
    assert ours.body["top_k"] == 3
    lengths = [int(headers.pop("content-length")) for headers in (ours.headers, theirs.headers)]
    assert lengths[0] == lengths[1]
    assert ours.headers == theirs.headers
    assert ours.headers["authorization"] == "Bearer key"


def test_a_key_that_is_a_function_is_asked_each_time(server: RawServer, ask: Ask) -> None:
    keys = iter(["one", "two"])
    model = model_of(server, api_key=lambda: next(keys))
    ask(model)
    ask(model)
    sent = [seen.headers["authorization"] for seen in server.seen]
    assert sent == ["Bearer one", "Bearer two"]


def test_bound_headers_query_and_time_limit(server: RawServer, ask: Ask) -> None:
    server.answers = [answer(x_mine="2")]
    bound: Any = model_of(server, include_response_headers=True).bind(
        extra_headers={"x-mine": "1"}, extra_query={"q": "2"}, timeout=4.0, extra_body={"top_k": 3}
    )
    assert ask(bound).response_metadata["headers"]["x-mine"] == "2"
    [seen] = server.seen
    assert seen.target == "/v1/chat/completions?q=2"
    assert seen.headers["x-mine"] == "1"
    assert seen.headers["x-stainless-read-timeout"] == "4.0"
    assert seen.body["top_k"] == 3
    assert not {"extra_headers", "extra_query", "timeout"} & seen.body.keys()


def test_the_users_http_client_is_used(server: RawServer) -> None:
    sent: list[str] = []

    def note(request: httpx.Request) -> httpx.Response:
        sent.append(str(request.url))
        return httpx.Response(200, json=COMPLETION)

    transport = httpx.MockTransport(note)
    http_client = httpx.Client(transport=transport)
    http_async_client = httpx.AsyncClient(transport=transport)
    one = model_of(server, http_client=http_client)
    assert one.invoke("hi").text == "yes"
    assert asyncio.run(one.ainvoke("hi")).text == "yes"  # not by the user's, which is synchronous
    other = model_of(server, http_async_client=http_async_client)
    assert asyncio.run(other.ainvoke("hi")).text == "yes"
    assert sent == [f"{server.base_url}/chat/completions"] * 2
    assert len(server.seen) == 1
    options = ChatART(model="m", http_socket_options=[])
    assert options.root_client._client is not http_pools.client
    assert options.root_async_client._client is not http_pools.async_client


@pytest.fixture
def proxied(server: RawServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RawServer]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HTTP_PROXY", server.root)
    http_pools.proxy.cache_clear()
    yield server
    http_pools.proxy.cache_clear()


def test_the_environments_proxy_and_its_exceptions(
    proxied: RawServer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(model_of(proxied, base_url="http://model.invalid/v1")).text == "yes"
    assert proxied.seen[0].target == "http://model.invalid/v1/chat/completions"
    assert proxied.seen[0].headers["host"] == "model.invalid"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    http_pools.proxy.cache_clear()
    assert ask(model_of(proxied)).text == "yes"
    assert proxied.seen[1].target == "/v1/chat/completions"


def test_what_passes_is_tried_again_as_often_as_was_said(server: RawServer, ask: Ask) -> None:
    """Refusals, a lost connection, a reply that is cut off."""

    def half(send: Callable[[bytes], None]) -> bool:
        send(answer()[:-10])
        return False

    passing = [refusal(status, retry_after_ms="1") for status in (408, 409, 429, 500, 503)]
    for first in (*passing, None, half):
        server.seen.clear()
        server.answers = [first, answer()]
        assert ask(model_of(server)).text == "yes"
        assert retries(server) == ["0", "1"]
        assert server.seen[0].body == server.seen[1].body
    for most in (0, 2):
        server.seen.clear()
        server.answers = [refusal(429, retry_after_ms="1")] * 9
        with pytest.raises(openai.RateLimitError) as caught:
            ask(model_of(server, max_retries=most))
        assert retries(server) == [str(i) for i in range(most + 1)]
        assert is_server_away(caught.value, "http://another/v1")
    server.answers = [refusal(503, x_should_retry="false")]
    with pytest.raises(openai.InternalServerError):
        ask(model_of(server))
    assert retries(server)[-1] == "0"


def test_retry_after_is_kept_to(server: RawServer, ask: Ask) -> None:
    server.answers = [refusal(503, retry_after="0.7"), answer()]
    begun = time.monotonic()
    ask(model_of(server))
    assert time.monotonic() - begun >= 0.7  # the SDK's own pause would be half a second at most


def test_errors_are_the_sdks(server: RawServer, ask: Ask) -> None:
    for status in (400, 401, 403, 404, 409, 413, 422, 429, 500, 503):
        caught: list[openai.APIStatusError] = []
        for build in (model_of, through_the_sdk):
            server.answers = [refusal(status, x_request_id="r-1")]
            with pytest.raises(openai.APIStatusError) as error:
                ask(build(server, max_retries=0))
            caught.append(error.value)
        ours, theirs = caught
        assert type(ours) is type(theirs)
        assert str(ours) == str(theirs)
        assert (ours.code, ours.param, ours.body) == (theirs.code, theirs.param, theirs.body)
        assert (ours.status_code, ours.request_id) == (status, "r-1")
        assert ours.response.json()["error"]["code"] == f"c{status}"
        assert ours.request.url == f"{server.base_url}/chat/completions"
    assert len(server.seen) == 20


def test_a_silent_server_runs_into_the_time_limit(server: RawServer, ask: Ask) -> None:
    done = threading.Event()

    def never(send: Callable[[bytes], None]) -> bool:
        done.wait()
        return False

    server.answers = [never, never]
    with pytest.raises(openai.APITimeoutError) as caught:
        ask(model_of(server, timeout=0.2, max_retries=1))
    done.set()
    assert retries(server) == ["0", "1"]
    assert is_server_away(caught.value, "http://another/v1")


def streamed(model: ChatART) -> list[Any]:
    return list(model.stream("hi"))


@pytest.mark.parametrize("streams", [False, True])
def test_no_server_at_all(ask: Ask, streams: bool) -> None:
    model = ChatART(model="m", base_url="http://127.0.0.1:9", max_retries=0)
    with pytest.raises(openai.APIConnectionError) as caught:
        (streamed if streams else ask)(model)
    assert is_server_away(caught.value, "http://another/v1")
    assert caught.value.request.url == "http://127.0.0.1:9/v1/chat/completions"
    assert "Start a server with `langchain-art serve MODEL`" in str(caught.value)
    assert "No answer from http://127.0.0.1:9/v1" in caught.value.message


@pytest.mark.parametrize("streams", [False, True])
def test_some_other_server(server: RawServer, ask: Ask, streams: bool) -> None:
    page = "<!DOCTYPE html>\n<html><head><title>Not here</title>" + "<p>" * 1000
    server.answers = [
        answer(page.encode(), 404, content_type="text/html"),
        answer({"detail": "Not Found"}, 404),
    ]
    for kind in ("text/html", "application/json"):
        with pytest.raises(openai.NotFoundError) as caught:
            (streamed if streams else ask)(model_of(server))
        said = str(caught.value)
        assert f"{server.base_url}/chat/completions answered 404 with {kind}" in said
        assert "Point base_url (or ART_BASE_URL) at one" in said and len(said) < 500


def test_an_answer_that_is_no_json(server: RawServer, ask: Ask) -> None:
    for build in (model_of, through_the_sdk):
        server.answers = [answer(b"<html>a page</html>", content_type="text/html")]
        with pytest.raises(openai.APIResponseValidationError, match=r"text/html.*base_url"):
            ask(build(server))
    assert len(server.seen) == 2


def test_a_redirect_is_followed(server: RawServer, ask: Ask) -> None:
    """By the SDK, which sends the call anew."""
    redirect = answer(b"", 307, location=f"{server.root}/there")
    server.answers = [redirect, redirect, answer()]
    assert ask(model_of(server)).text == "yes"
    path = "/v1/chat/completions"
    assert [seen.target for seen in server.seen] == [path, path, "/there"]


def test_a_connection_that_the_server_closed_is_not_used_again(server: RawServer, ask: Ask) -> None:
    def last(send: Callable[[bytes], None]) -> bool:
        send(answer())
        return False

    server.answers = [last for _ in range(20)]
    model = model_of(server, max_retries=0)
    for _ in range(20):
        assert ask(model).text == "yes"
        time.sleep(0.01)
    assert retries(server) == ["0"] * 20


def test_compressed_answers(server: RawServer, ask: Ask) -> None:
    packed = gzip.compress(json.dumps(COMPLETION).encode())
    refused = gzip.compress(json.dumps({"error": {"message": "no", "code": "c"}}).encode())
    server.answers = [answer(packed, content_encoding="gzip")]
    assert ask(model_of(server)).text == "yes"
    server.answers = [answer(refused, 404, content_encoding="gzip")]
    with pytest.raises(openai.NotFoundError) as caught:
        ask(model_of(server))
    assert caught.value.code == "c"


DELTA = {"index": 0, "delta": {"role": "assistant", "content": "é😀"}}
CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m@1", "created": 1}
EVENT = b"data: %b\n\n" % json.dumps(CHUNK | {"choices": [DELTA]}).encode()


def stream(model: ChatART, how: str, seen: list[Any]) -> None:
    """Keeps each chunk of a streamed reply."""

    async def chunks() -> None:
        async for one in model.astream("hi"):
            seen.append(one)

    seen.extend(model.stream("hi")) if how == "stream" else asyncio.run(chunks())


@pytest.mark.parametrize("how", ["stream", "astream"])
def test_a_stream_that_is_cut_off_says_so(server: RawServer, how: str) -> None:
    def cut(send: Callable[[bytes], None]) -> bool:
        send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        send(b"transfer-encoding: chunked\r\n\r\n")
        send(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
        return False

    server.answers = [cut]
    with pytest.raises((openai.APIConnectionError, httpx.TransportError)) as caught:
        stream(model_of(server), how, [])
    assert is_server_away(caught.value, "http://another/v1")
    assert len(server.seen) == 1  # half of a sample is no reason to draw another


@pytest.mark.parametrize("how", ["stream", "astream"])
def test_a_stream_that_was_refused_first_and_then_says_an_error(
    server: RawServer, how: str
) -> None:
    error = json.dumps(EngineUnavailable("the engine is gone").body()).encode()
    said = EVENT + b"data: %b\n\n" % error
    server.answers = [refusal(503, retry_after_ms="1")]
    server.answers += [answer(said, content_type="text/event-stream")]
    seen: list[Any] = []
    model = model_of(server, include_response_headers=True)
    with pytest.raises(openai.APIError, match="the engine is gone") as caught:
        stream(model, how, seen)
    assert caught.value.code == "engine_unavailable"
    assert is_server_away(caught.value, "http://another/v1")
    assert retries(server) == ["0", "1"]
    assert [one.text for one in seen] == ["é😀"]
    assert seen[0].response_metadata["call_id"] == "chatcmpl-1"
    assert seen[0].response_metadata["headers"]["content-type"] == "text/event-stream"
