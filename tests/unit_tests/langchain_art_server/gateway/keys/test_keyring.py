"""A key is found by its hash, once made, until it ends; the key itself is kept nowhere."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from langchain_art.errors import ConfigError
from langchain_art.wire import KeyLimits, KeySpec
from langchain_art.wire.api_keys import new_api_key
from langchain_art_server.gateway.keys import keyring
from langchain_art_server.gateway.keys.keyring import Keyring
from langchain_art_server.storage.store import Store

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
    """What is looked up is the hash of what was sent, never what was sent."""
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
