from collections.abc import Iterator

import pytest

from langchain_art.wire import KeySpec
from langchain_art_server.storage import key_store
from langchain_art_server.storage.store import Store


@pytest.fixture
def store(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(key_store, "MAX_ENTRIES", 3)
    opened = Store(database_url)
    yield opened
    opened.close()


async def logged(store: Store) -> list[str]:
    page = await store.keys.actions(100)
    return [f"{one.tenant} {one.subject}" for one in reversed(page.items)]


async def made(store: Store, name: str, tenant: str, *scopes: str) -> str:
    spec = KeySpec.model_validate({"name": name, "tenant": tenant, "scopes": scopes or ("submit",)})
    return (await store.keys.add(spec, f"{name:0>64}", by="ART_API_KEY")).id


async def test_a_tenant_pushes_out_its_own_oldest_entries_only(store: Store) -> None:
    """Whichever of its keys they are of; and an administrator his own."""
    keys = [await made(store, name, "ana") for name in "ac"]
    bob = await made(store, "b", "bob")
    await store.keys.note("bob", bob, "trained", "by bob")
    for number in range(8):
        await store.keys.note("ana", keys[number % 2], "rolled_back", str(number))
        await store.keys.note("default", ("ART_API_KEY", None)[number % 2], "trained", str(number))
    found = await logged(store)
    entries = [f"{tenant} {number}" for number in (5, 6, 7) for tenant in ("ana", "default")]
    assert found == ["bob by bob", *entries]


async def test_other_keys_of_the_default_tenant_do_not_push_out_an_administrators(
    store: Store,
) -> None:
    chief = await made(store, "chief", "default", "admin")
    plain = await made(store, "plain", "default", "review")
    await store.keys.note("default", chief, "trained", "by chief")
    for number in range(8):
        await store.keys.note("default", plain, "trained", str(number))
    found = await logged(store)
    assert "default by chief" in found and found[-3:] == ["default 5", "default 6", "default 7"]


async def test_a_subject_that_fits_is_whole_and_a_longer_one_is_cut(store: Store) -> None:
    fits = "x" * key_store.MAX_SUBJECT
    for text in (fits, "x" * 4096, "é" * 4096, "日" * 4096, "👍" * 4096):
        await store.keys.note("default", None, "rolled_back", text)
        (entry,) = (await store.keys.actions(1)).items
        size = len(entry.subject.encode())
        assert key_store.MAX_SUBJECT - 4 < size <= key_store.MAX_SUBJECT
        assert entry.subject == fits if text == fits else entry.subject.endswith(f"{text[0]}…")
