"""Wrong keys are slowed by peer and logged without the key; right ones never are."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from langchain_art_server.config import Settings
from langchain_art_server.gateway import auth
from langchain_art_server.gateway.auth import AccessControl, peer_of
from langchain_art_server.gateway.keys.keyring import Keyring

KEY = "PqT7cX0vM5hYw2Jd9sKf3LbR8nGz1Ua6EoWiC4tVyQx"


def client(app: AccessControl, key: str, peer: str = "10.0.0.1") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=(peer, 1))
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=transport, base_url="http://art", headers=headers)


@pytest.fixture
def app() -> AccessControl:
    return AccessControl(lambda _: PlainTextResponse("in"), Settings(model="m"), keys=Keyring(KEY))


async def test_wrong_keys_are_slowed_and_a_right_one_is_not(
    app: AccessControl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slept, over = list[float](), asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await over.wait()

    monkeypatch.setattr(auth, "asyncio", SimpleNamespace(sleep=sleep, Semaphore=asyncio.Semaphore))
    with caplog.at_level(logging.WARNING):
        async with client(app, "wrong-and-secret") as wrong, client(app, KEY) as right:
            asked = [asyncio.create_task(wrong.get("/v1/models")) for _ in range(100)]
            while sum(one.done() for one in asked) < 100 - auth._MAY_WAIT:
                await asyncio.sleep(0)
            statuses = [one.result().status_code for one in asked if one.done()]
            assert statuses.count(401) == auth._AT_ONCE
            assert statuses.count(429) == len(statuses) - auth._AT_ONCE
            assert (await right.get("/v1/models")).text == "in"
            async with client(app, "other", "10.0.0.2") as other:
                assert (await other.get("/v1/models")).status_code == 401
            assert slept == [auth._SLOW] * auth._MAY_WAIT
            over.set()
            late = [answer.status_code for answer in await asyncio.gather(*asked)]
            assert late.count(401) == auth._AT_ONCE + auth._MAY_WAIT
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "10.0.0.1" in lines[0]  # one a peer in ten seconds
    assert "wrong-and-secret" not in caplog.text


async def test_a_client_has_so_many_requests_at_once_and_another_does_not_wait_for_it() -> None:
    begun, over = list[str](), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["client"][0])
        await over.wait()
        await PlainTextResponse("in")(scope, receive, send)

    app = AccessControl(lambda _: slow, Settings(model="m"), keys=Keyring(KEY))
    async with client(app, KEY) as one, client(app, KEY, "10.0.0.2") as other:
        asked = [asyncio.create_task(one.get("/v1/models")) for _ in range(3 * auth.AT_ONCE)]
        asked.append(asyncio.create_task(one.get("/healthz")))
        asked.append(asyncio.create_task(other.get("/v1/models")))
        while "10.0.0.2" not in begun:
            await asyncio.sleep(0)
        assert begun.count("10.0.0.1") == auth.AT_ONCE + 1  # and the open path, which never waits
        over.set()
        answers = await asyncio.gather(*asked)
    assert len(begun) == len(asked) and {answer.text for answer in answers} == {"in"}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_a_host_is_one_peer_whatever_its_addresses(one: str, other: str, same: bool) -> None:
    scopes: list[dict[str, Any]] = [{"client": (address, 1)} for address in (one, other)]
    assert (peer_of(scopes[0]) == peer_of(scopes[1])) == same
