import socket
import ssl

import httpx
import pytest

from langchain_art.client import http_request
from langchain_art.client.http_request import FIRST_ANSWER, SILENCE, Backoff, Waiting, reason
from langchain_art.errors import EngineUnavailable, ServerUnreachable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("langchain_art.client.http_request.time", made)
    return made


def refused() -> httpx.ConnectError:
    """As httpx raises it over asyncio: the errno is three causes below."""
    error = httpx.ConnectError("All connection attempts failed")
    error.__cause__ = OSError("All connection attempts failed")
    error.__cause__.__cause__ = ExceptionGroup("", [ConnectionRefusedError(111, "refused")])
    return error


def test_a_reason_is_a_few_words() -> None:
    assert reason(refused()) == "connection refused"
    tls = httpx.ConnectError("failed")
    tls.__cause__ = ssl.SSLCertVerificationError(1, "certificate verify failed")
    assert reason(tls) == "no TLS connection: certificate verify failed"
    assert reason(httpx.ConnectTimeout("")) == "no connection: the machine does not answer"
    assert reason(httpx.ReadTimeout("")) == "no answer, though it takes connections"
    assert reason(EngineUnavailable("The sampler is starting.")) == "The sampler is starting."
    unknown = httpx.ConnectError("x")
    unknown.__cause__ = socket.gaierror(-2, "Name or service not known")
    assert reason(unknown) == "name or service not known"
    assert reason(httpx.RemoteProtocolError("closed")) == "closed"


def test_the_same_is_said_twice_a_minute_and_the_end_once(clock: Clock) -> None:
    said: list[str] = []
    told = Waiting("http://h/v1", said.append)
    told.answer(200)
    assert said == []
    for _ in range(4):
        told.because("connection refused")
        clock.now += 10
    told.answer(503)  # it is there, and not ready: the wait is not over
    told.answer(200)
    told.answer(200)
    assert said == [
        "waiting for http://h/v1: connection refused",
        "waiting for http://h/v1: connection refused (for 30 s now)",
        "http://h/v1 answers again, after 40 s",
    ]


def test_a_server_that_never_answered_is_waited_for_ten_seconds(clock: Clock) -> None:
    said: list[str] = []
    backoff = Backoff(Waiting("http://h/v1", said.append), 300.0)
    backoff.after(refused())
    assert said == ["waiting for http://h/v1: connection refused"], "at once"
    clock.now += FIRST_ANSWER - 0.1
    assert backoff.after(refused()) <= 0.1
    clock.now += 0.1
    with pytest.raises(ServerUnreachable) as caught:
        backoff.after(refused())
    for words in ("http://h/v1 in 10 s: connection refused", "langchain-art serve", "ART_BASE_URL"):
        assert words in str(caught.value)


def test_one_that_did_answer_is_waited_for_as_long_as_there_is_patience(clock: Clock) -> None:
    told = Waiting("http://h/v1", lambda _: None)
    told.answer(502)  # of a proxy: the server itself said nothing
    assert not told.answered
    told.answer(503)
    backoff = Backoff(told, 300.0)
    clock.now += 299
    backoff.after(refused())
    clock.now += 1
    with pytest.raises(ServerUnreachable, match="in 300 s"):
        backoff.after(refused())
    asked = Backoff(Waiting("http://h/v1", lambda _: None), 60.0, asked=True)
    clock.now += 59
    asked.after(refused())


def test_a_short_pause_is_nothing_to_speak_of(clock: Clock) -> None:
    said: list[str] = []
    backoff = Backoff(Waiting("http://h/v1", said.append), 60.0)
    backoff.after(EngineUnavailable("busy", retry_after=0.1))
    assert said == []
    backoff.after(EngineUnavailable("busy", retry_after=SILENCE))
    assert said == ["waiting for http://h/v1: busy"]


def test_without_a_listener_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    Waiting("http://h/v1").because("connection refused")
    assert [r.levelname for r in caplog.records if r.name == http_request.__name__] == ["WARNING"]
