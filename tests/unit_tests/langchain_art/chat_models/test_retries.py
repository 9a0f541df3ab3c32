"""Failed requests are retried as the OpenAI SDK retries them."""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import Any

import openai
import pytest

from langchain_art.chat_models.http_pools import httpx
from langchain_art.chat_models.retries import retry_delay, sdk_error

SDK = openai.OpenAI(api_key="key", base_url="http://localhost/v1")
REQUEST = httpx.Request("POST", "http://localhost/v1/chat/completions")


def refusal(status: int, headers: dict[str, str] | None = None, body: Any = None) -> httpx.Response:
    return httpx.Response(status, headers=headers, json=body, request=REQUEST)


@pytest.mark.parametrize("said", [None, "true", "false", "perhaps"])
@pytest.mark.parametrize("status", [400, 401, 404, 408, 409, 413, 422, 429, 500, 502, 503, 529])
def test_the_sdk_retries_the_same_answers(status: int, said: str | None) -> None:
    answer = refusal(status, {"x-should-retry": said} if said else {})
    assert (retry_delay(answer, 0, 1) is not None) == SDK._should_retry(answer)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "7"}, 7.0),
        ({"retry-after": "121"}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_delay(refusal(503, headers), 0, 2) == seconds


@pytest.mark.parametrize("value", ["-3", "0", "nan", "inf", "soon", ""])
def test_a_retry_after_that_says_nothing(value: str) -> None:
    delay = retry_delay(refusal(503, {"retry-after": value}), 0, 2)
    assert delay is not None
    assert 0.375 <= delay <= 0.5


def test_retry_after_a_date() -> None:
    date = formatdate(time.time() + 60, usegmt=True)
    delay = retry_delay(refusal(429, {"retry-after": date}), 0, 2)
    assert delay is not None
    assert 50 < delay <= 60
    assert retry_delay(refusal(429, {"retry-after": formatdate(0, usegmt=True)}), 0, 2) is not None


def test_delays_grow_and_end() -> None:
    for taken, most in enumerate([0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]):
        delay = retry_delay(ConnectionError(), taken, 7)
        assert delay is not None
        assert 0.75 * most <= delay <= most
    assert retry_delay(ConnectionError(), 7, 7) is None
    assert retry_delay(TimeoutError(), 0, 0) is None


@pytest.mark.parametrize("body", [{"error": {"message": "no", "code": "c"}}, {"x": 1}, [1], "no"])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 429, 500, 503])
def test_errors_are_the_sdks(status: int, body: Any) -> None:
    ours = sdk_error(refusal(status, {"x-request-id": "r-1"}, body), REQUEST)
    theirs = SDK._make_status_error_from_response(refusal(status, {"x-request-id": "r-1"}, body))
    assert isinstance(ours, openai.APIStatusError)
    assert type(ours) is type(theirs)
    assert str(ours) == str(theirs)
    assert (ours.body, ours.code, ours.request_id) == (theirs.body, theirs.code, "r-1")


def test_connection_errors_are_the_sdks() -> None:
    assert type(sdk_error(TimeoutError(), REQUEST)) is openai.APITimeoutError
    assert type(sdk_error(ConnectionResetError(), REQUEST)) is openai.APIConnectionError
