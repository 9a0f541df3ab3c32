import pytest

from langchain_art_server.gateway import sessions
from langchain_art_server.gateway.sessions import MAX_SESSIONS, SESSION_SECONDS, Sessions

KEY = "PqT7cX0vM5hYw2Jd9sKf3LbR8nGz1Ua6EoWiC4tVyQx"


def sent(one: Sessions, value: str) -> dict[bytes, bytes]:
    return {b"cookie": f"other=1; {one.cookie}={value}".encode("latin-1")}


def test_a_session_holds_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Sessions(KEY)
    value = mine.new(b"hash")
    token = mine.token(sent(mine, value))
    assert token and token not in value
    now = sessions.time.monotonic()
    for seconds, expected in ((SESSION_SECONDS - 60, token), (SESSION_SECONDS + 60, None)):
        monkeypatch.setattr(sessions.time, "monotonic", lambda at=now + seconds: at)
        assert mine.token(sent(mine, value)) == expected


def test_who_logs_out_ends_that_session_alone() -> None:
    mine = Sessions(KEY)
    first, second = sent(mine, mine.new(b"hash")), sent(mine, mine.new(b"hash"))
    assert mine.token(first) != mine.token(second)
    mine.end(first)
    mine.end({})  # without a session there is nothing to end
    assert mine.token(first) is None
    assert mine.token(second) is not None


def test_another_server_or_a_changed_cookie_opens_nothing() -> None:
    mine, other = Sessions(KEY), Sessions(KEY[::-1])
    assert mine.cookie != other.cookie
    value = mine.new(b"hash")
    assert Sessions(KEY).token(sent(mine, value)) is None  # the server was started again
    assert other.token(sent(other, value)) is None
    for changed in (value[:-1], f"{value}.", value.swapcase(), "", ".", "ÿ.ÿ.ÿ"):
        assert mine.token(sent(mine, changed)) is None, changed
    assert mine.token({}) is None
    assert mine.token({b"cookie": b"\xff=\xff; ;;="}) is None


def test_the_sessions_of_one_key_end_none_of_another() -> None:
    mine = Sessions(KEY)
    kept = [sent(mine, mine.new(key)) for key in (b"administrator", b"tenant")]
    for count in range(1, 3 * MAX_SESSIONS):
        newest = mine.new(b"tenant")
        assert mine.token(sent(mine, newest)) and mine.token(kept[0])
        assert (mine.token(kept[1]) is not None) is (count < MAX_SESSIONS)
