"""Errors are answered in one shape, in few words whatever was got, and without words of ours."""

import asyncio
import json
import tracemalloc
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message

from langchain_art.errors import EngineUnavailable, InvalidRequest, PromptTooLong
from langchain_art_server.gateway import request_bodies
from langchain_art_server.gateway.refusals import answer, no_such_route, shown
from langchain_art_server.gateway.request_bodies import RequestBodies, checked_key

HUGE = 10**5000
PATH = "/v1/chat/completions"


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


def test_what_nobody_expected_tells_nothing() -> None:
    response = answer(ValueError("the password is 1234"), PATH)
    assert response.status_code == 500
    error = json.loads(bytes(response.body))["error"]
    assert set(error) == {"message", "type", "code", "param"} and "1234" not in error["message"]


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


class Sender:
    """A body whose parts come when they are told to."""

    def __init__(self, bodies: RequestBodies, client: str = "") -> None:
        self._parts: asyncio.Queue[Message] = asyncio.Queue()
        self.task = asyncio.create_task(self._receive(bodies, client))

    async def _receive(self, bodies: RequestBodies, client: str) -> int:
        received, more = 0, True
        with bodies.admit({}, self._parts.get, client) as body:
            while more:
                message = await body.receive()
                received, more = received + len(message["body"]), message["more_body"]
        return received

    async def send(self, size: int, more: bool = True) -> None:
        self._parts.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})
        for _ in range(4):
            await asyncio.sleep(0)


@pytest.mark.parametrize("key", ["fit/1", "-a", "a b", "", "a" * 9])
def test_a_key_that_is_refused_is_none_that_the_words_allow(key: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked_key(key, 8)
    allowed = str(refused.value).partition("characters from ")[2].partition(" that begin")[0]
    assert allowed == "A-Z a-z 0-9 . _ : @ + = -"
    assert checked_key("a.Z_0:@=", 8) and checked_key("9+-", 8)


async def test_beyond_the_budget_the_largest_body_is_refused() -> None:
    bodies = RequestBodies(1000)
    large, larger, small = (Sender(bodies) for _ in range(3))
    for sender, size in ((large, 950), (larger, 990), (small, 90)):  # 2,030 of 2,000 bytes
        await sender.send(size)
    with pytest.raises(EngineUnavailable) as refused:
        await larger.task
    assert refused.value.retry_after
    for sender, size, whole in ((large, 50, 1000), (small, 10, 100)):
        await sender.send(size, more=False)
        assert await sender.task == whole
    assert bodies._held == 0 and not bodies._unfinished


async def test_large_bodies_of_one_client_are_taken_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A second for each: a slow machine sends all within one.
    monkeypatch.setattr(request_bodies, "_TAKEN_PER_SECOND", 1 << 20)
    bodies, loop = RequestBodies(32 << 20), asyncio.get_running_loop()
    begun, mega = loop.time(), 1 << 20
    mine, other = [Sender(bodies, "a") for _ in range(3)], Sender(bodies, "b")
    for sender in (*mine, other):
        await sender.send(mega - 1)
        await sender.send(1, more=False)
    assert [sender.task.done() for sender in (*mine, other)] == [True, False, False, True]
    assert bodies._held == 2 * mega, "those that wait count"
    assert await asyncio.gather(*(sender.task for sender in mine)) == [mega] * 3
    assert loop.time() - begun >= 1.9
    small = [Sender(bodies, "a") for _ in range(3)]
    for sender in small:
        await sender.send(1000, more=False)
    assert all(sender.task.done() for sender in small)
    assert bodies._held == 0


async def test_large_bodies_that_wait_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies, all_sent = RequestBodies(100_000), asyncio.Event()
    # By the clock, a slow machine would take the first before the last one is sent.
    monkeypatch.setattr(bodies, "turn", lambda *_: all_sent.wait())
    senders = [Sender(bodies, "a") for _ in range(4)]
    for sender in senders:
        await sender.send(90_000, more=False)
    all_sent.set()
    found = await asyncio.gather(*(s.task for s in senders), return_exceptions=True)
    # Two of them fit, and each further one costs the largest its place.
    assert sum(isinstance(one, EngineUnavailable) for one in found) == 2
    assert found.count(90_000) == 2
    assert bodies._held == 0


def test_a_chat_request_is_bounded_by_the_context() -> None:
    bodies = RequestBodies(32 << 20, context=1024)
    most = (1 << 20) + 16 * 1024
    for length, chat in ((most, True), (most + 1, False)):
        bodies.admit({b"content-length": b"%d" % length}, asyncio.Queue().get, "", chat=chat)
    with pytest.raises(PromptTooLong, match=f"expected at most {most}.*max_model_len"):
        bodies.admit({b"content-length": b"%d" % (most + 1)}, asyncio.Queue().get, "", chat=True)
