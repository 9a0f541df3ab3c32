"""Errors are answered in one shape, in few words whatever was got, and without words of ours."""

import errno
import json
import tracemalloc
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from langchain_art.errors import InvalidRequest
from langchain_art_server.gateway.chat.request import CheckedChatRequest
from langchain_art_server.gateway.refusals import answer, no_such_route, shown

HUGE = 10**5000
PATH = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000_000, HUGE, -HUGE, [["y" * 1_000_000] * 1000] * 1000, {"a" * 1_000_000: HUGE}],
    ids=["text", "integer", "negative", "nested", "name"],
)
def test_a_message_shows_little_of_a_value_and_writes_little(value: Any) -> None:
    tracemalloc.start()
    try:
        assert len(shown(value)) < 500
        assert tracemalloc.get_traced_memory()[1] < 100_000  # the value written out: megabytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "odd",
    [
        {"seed": [HUGE]},
        {"frequency_penalty": HUGE},
        {"n": HUGE},
        {"temperature": HUGE},
        {"tool_choice": "z" * 1_000_000},
        {"z" * 1_000_000: 1},
        {"messages": [{"role": HUGE}]},
        {"messages": [{"role": "user", "content": "x", "audio": HUGE}]},
        {"tools": [{"type": HUGE}]},
        {"tools": [{"type": "function", "function": {"name": HUGE}}]},
    ],
    ids=lambda odd: next(iter(odd))[:20],
)
def test_what_is_odd_is_refused_in_few_words(odd: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        CheckedChatRequest(ASK | odd)
    assert len(answer(refused.value, PATH).body) < 5000


def test_what_nobody_expected_tells_nothing() -> None:
    response = answer(ValueError("the password is 1234"), PATH)
    assert response.status_code == 500
    error = json.loads(bytes(response.body))["error"]
    assert set(error) == {"message", "type", "code", "param"} and "1234" not in error["message"]


def test_a_full_disk_is_said() -> None:
    response = answer(OSError(errno.ENOSPC, "No space left on device"), PATH)
    assert response.status_code == 503 and response.headers["retry-after"]


def test_a_path_without_its_v1_is_told_so() -> None:
    for path, words in (
        ("/chat/completions", "base_url ends with /v1 here: '/v1/chat/completions'"),
        ("/api/readyz", "base_url (ART_BASE_URL) is http://HOST:PORT/v1 here"),
        ("/foo/status", "base_url (ART_BASE_URL) is http://HOST:PORT/v1 here"),
        ("/models", "'/v1/models'"),
        ("/other", "GET /openapi.json lists the routes"),
    ):
        error = json.loads(bytes(no_such_route("POST", path, HTTPException(404)).body))["error"]
        assert words in error["message"] and error["code"] == "not_found"
