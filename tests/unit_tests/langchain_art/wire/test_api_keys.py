"""Keys of 32 random bytes are taken in each usual form, and what was made of fewer is refused."""

import base64
import secrets

import pytest

from langchain_art.errors import ConfigError
from langchain_art.wire.api_keys import key_problem, new_api_key
from langchain_art_server.config import load_settings


def test_random_keys_are_taken() -> None:
    made = {new_api_key() for _ in range(500)}
    assert len(made) == 500
    usual = [secrets.token_hex, lambda n: base64.b64encode(secrets.token_bytes(n)).decode()]
    for key in [*made, *(make(32) for make in usual for _ in range(500))]:
        assert key_problem(key) is None


@pytest.mark.parametrize(
    "key", ["a" * 16, "a" * 64, "0123456789abcdef" * 4, "69ab42fe9705b86f6e8b377cb5b14eb9"]
)
def test_others_are_refused_with_the_next_step(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("ART_API_KEY", key)
    with pytest.raises(ConfigError, match="langchain-art key new") as refused:
        load_settings(model="m")
    assert key not in str(refused.value)
