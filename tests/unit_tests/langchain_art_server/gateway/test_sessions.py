"""Sessions end with their time, and hold for the key that signed them alone."""

from __future__ import annotations

import pytest

from langchain_art_server.gateway import sessions
from langchain_art_server.gateway.sessions import SESSION_SECONDS, Sessions

KEY = "PqT7cX0vM5hYw2Jd9sKf3LbR8nGz1Ua6EoWiC4tVyQx"


def sent(one: Sessions, value: str) -> dict[bytes, bytes]:
    return {b"cookie": f"other=1; {one.cookie}={value}".encode("latin-1")}


def test_a_session_holds_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Sessions(KEY)
    value = mine.new()
    token = mine.token(sent(mine, value))
    assert token and token not in value
    assert Sessions(KEY).token(sent(mine, value)) == token  # after a restart
    monkeypatch.setattr(sessions.time, "time", lambda: 2e9 + SESSION_SECONDS)
    assert mine.token(sent(mine, value)) is None


def test_another_key_or_a_changed_cookie_opens_nothing() -> None:
    mine, other = Sessions(KEY), Sessions(KEY[::-1])
    assert mine.cookie != other.cookie
    value = mine.new()
    assert other.token(sent(other, value)) is None
    expires, nonce, signature = value.split(".")
    later = f"{int(expires) + 1}.{nonce}.{signature}"
    for changed in (later, f"{expires}.{nonce}", f"{expires}.x.{signature}", "", ".", "ÿ.ÿ.ÿ"):
        assert mine.token(sent(mine, changed)) is None, changed
    assert mine.token({}) is None
    assert mine.token({b"cookie": b"\xff=\xff; ;;="}) is None


def test_two_sessions_have_two_tokens() -> None:
    mine = Sessions(KEY)
    tokens = {mine.token(sent(mine, mine.new())) for _ in range(3)}
    assert len(tokens) == 3 and None not in tokens
