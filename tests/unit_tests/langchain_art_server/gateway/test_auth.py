"""Wrong keys are slowed by peer and logged without the key; right ones never are."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from langchain_art.errors import ConfigError
from langchain_art.wire import KeyLimits, KeySpec
from langchain_art.wire.api_keys import new_api_key
from langchain_art_server.config import Settings
from langchain_art_server.gateway import auth, sessions
from langchain_art_server.gateway.auth import AccessControl, peer_of
from langchain_art_server.gateway.keys import keyring
from langchain_art_server.gateway.keys.keyring import Keyring
from langchain_art_server.gateway.keys.scopes import (
    OPEN,
    RULES,
    is_path,
    require_rules,
    routes_of,
    rule_of,
)
from langchain_art_server.gateway.sessions import MAX_SESSIONS, SESSION_SECONDS, Sessions
from langchain_art_server.storage.store import Store

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


SERVERS = new_api_key()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store(f"sqlite:///{tmp_path / 'art.sqlite3'}")
    yield opened
    opened.close()


def sent(key: str) -> bytes:
    return f"Bearer {key}".encode()


async def test_what_a_key_has_taken_is_not_forgotten_when_another_is_made(store: Store) -> None:
    ring = Keyring(SERVERS, store.keys, lambda: 0.0)
    limits = KeyLimits(calls_per_minute=2)
    made = await ring.make(KeySpec(name="one", limits=limits), by=None)
    meter = ring.find(sent(made.key)).meter  # type: ignore[union-attr]
    assert meter is not None
    meter.begin(1)
    await ring.make(KeySpec(name="two"), by=None)
    assert ring.find(sent(made.key)).meter is meter  # type: ignore[union-attr]
    assert not any(key in repr(vars(ring)) for key in (SERVERS, made.key))


async def test_hashes_are_compared_in_constant_time_and_found_by_one_access(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lookup takes the hash of the key that was sent, never the key."""
    ring = Keyring(SERVERS)
    asked: list[bytes] = []
    compared: list[tuple[bytes, bytes]] = []

    class Watched(dict[bytes, Any]):
        def get(self, key: bytes, default: Any = None) -> Any:
            asked.append(key)
            return super().get(key, default)

    in_constant_time = secrets.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return in_constant_time(one, other)

    ring._by_hash = Watched(ring._by_hash)
    monkeypatch.setattr(keyring.secrets, "compare_digest", compare)
    assert ring.find(sent(SERVERS)) is not None
    assert ring.find(sent("wrong")) is None
    assert [len(one) for one in asked] == [32, 32] and asked[0] != asked[1]
    assert compared == [(asked[0], asked[0])]


async def test_a_tenant_that_cannot_be_opened_takes_no_other_along(store: Store) -> None:
    async def opens(tenant: str) -> None:
        if tenant == "damaged":
            raise ConfigError("its database is damaged")

    first = Keyring(SERVERS, store.keys)
    keys = [await first.make(KeySpec(name=t, tenant=t), by=None) for t in ("damaged", "whole")]
    ring = Keyring(SERVERS, store.keys, open_tenant=opens)
    await ring.refresh()
    assert [ring.find(sent(one.key)) is not None for one in keys] == [False, True]
    with pytest.raises(ConfigError, match="is damaged"):  # before the key is made
        await ring.make(KeySpec(name="more", tenant="damaged"), by=None)
    assert len(await store.keys.all()) == 2


@pytest.mark.parametrize("tenant", ["", "A", "a_b", "../x", "a.b", "-a", "a" * 41, "a\n", "a/b"])
def test_a_tenants_name_is_that_of_a_directory_and_a_schema(tenant: str) -> None:
    with pytest.raises(ConfigError, match="expected 1-40 characters"):
        KeySpec(name="x", tenant=tenant)


def test_a_route_without_a_rule_is_not_served() -> None:
    app = FastAPI(docs_url=None, redoc_url=None)
    require_rules(app.routes)
    router = APIRouter(prefix="/page")

    @router.get("/secrets")
    def secrets() -> None: ...

    app.include_router(router)
    assert ("GET", "/page/secrets") in set(routes_of(app.routes))
    with pytest.raises(LookupError, match="/page/secrets"):
        require_rules(app.routes)


def test_each_route_is_found_by_its_own_rule() -> None:
    for (method, template), rule in RULES.items():
        path = template
        for name in ("name", "version", "call_id", "trajectory_id", "job_id", "key_id"):
            path = path.replace(f"{{{name}}}", "pin")  # which is also a part of a path
        assert rule_of(method, path) is rule, (method, template)
        assert is_path(path) and is_path(f"{path}/")
        assert rule_of("PATCH", path) is None
    assert all(is_path(path) for _, path in OPEN)


def cookie(one: Sessions, value: str) -> dict[bytes, bytes]:
    return {b"cookie": f"other=1; {one.cookie}={value}".encode("latin-1")}


def test_a_session_holds_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Sessions(KEY)
    value = mine.new(b"hash")
    token = mine.token(cookie(mine, value))
    assert token and token not in value
    now = sessions.time.monotonic()
    for seconds, expected in ((SESSION_SECONDS - 60, token), (SESSION_SECONDS + 60, None)):
        monkeypatch.setattr(sessions.time, "monotonic", lambda at=now + seconds: at)
        assert mine.token(cookie(mine, value)) == expected


def test_who_logs_out_ends_that_session_alone() -> None:
    mine = Sessions(KEY)
    first, second = cookie(mine, mine.new(b"hash")), cookie(mine, mine.new(b"hash"))
    assert mine.token(first) != mine.token(second)
    mine.end(first)
    mine.end({})  # without a session there is nothing to end
    assert mine.token(first) is None
    assert mine.token(second) is not None


def test_another_server_or_a_changed_cookie_opens_nothing() -> None:
    mine, other = Sessions(KEY), Sessions(KEY[::-1])
    assert mine.cookie != other.cookie
    value = mine.new(b"hash")
    assert Sessions(KEY).token(cookie(mine, value)) is None  # the server was started again
    assert other.token(cookie(other, value)) is None
    for changed in (value[:-1], f"{value}.", value.swapcase(), "", ".", "ÿ.ÿ.ÿ"):
        assert mine.token(cookie(mine, changed)) is None, changed
    assert mine.token({}) is None
    assert mine.token({b"cookie": b"\xff=\xff; ;;="}) is None


def test_the_sessions_of_one_key_end_none_of_another() -> None:
    mine = Sessions(KEY)
    kept = [cookie(mine, mine.new(key)) for key in (b"administrator", b"tenant")]
    for count in range(1, 3 * MAX_SESSIONS):
        newest = mine.new(b"tenant")
        assert mine.token(cookie(mine, newest)) and mine.token(kept[0])
        assert (mine.token(kept[1]) is not None) is (count < MAX_SESSIONS)
