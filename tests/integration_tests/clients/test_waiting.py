"""A server that is not there, or takes connections and says nothing: said at once, and an error."""

import io
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from langchain_art import ArtClient, Trainer
from langchain_art.client.http_request import FIRST_ANSWER, SILENCE, Backoff, Waiting, reason
from langchain_art.errors import EngineUnavailable, ServerUnreachable


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langchain_art.client.http_request.FIRST_ANSWER", 1.0)
    monkeypatch.setattr("langchain_art.client.http_request.SILENCE", 0.1)


@pytest.fixture(params=["nobody", "silent"])
def base_url(request: pytest.FixtureRequest, soon: None) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        if request.param == "nobody":
            listening.close()
        yield f"http://127.0.0.1:{port}/v1"


def test_a_fit_and_a_client_without_a_server_are_not_silent_and_end(
    base_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    console = Console(file=io.StringIO(), width=200)
    client = ArtClient(base_url)
    trainer = Trainer("p", client=client, out_dir=tmp_path, console=console)
    with pytest.raises(ServerUnreachable) as caught:
        trainer.fit_sync(lambda _: 1.0, ["x"], steps=1)
    for words in (base_url, "langchain-art serve"):
        assert words in str(caught.value)
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"waiting for {base_url}: " in shown
    assert "connection refused" in shown or "no answer yet to GET /readyz" in shown
    with ArtClient(base_url) as plain, pytest.raises(ServerUnreachable):
        plain.ready()
    assert f"waiting for {base_url}: " in caplog.text


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


def test_a_server_that_never_answered_is_waited_for_ten_seconds_others_with_patience(
    clock: Clock,
) -> None:
    said: list[str] = []
    backoff = Backoff(Waiting("http://h/v1", said.append), 300.0)
    backoff.after(EngineUnavailable("busy", retry_after=0.1))
    assert said == [], "a short pause is nothing to speak of"
    backoff.after(EngineUnavailable("busy", retry_after=SILENCE))
    backoff.after(refused())
    assert said == [f"waiting for http://h/v1: {why}" for why in ("busy", "connection refused")]
    clock.now += FIRST_ANSWER - 0.1
    assert backoff.after(refused()) <= 0.1
    clock.now += 0.1
    with pytest.raises(ServerUnreachable) as caught:
        backoff.after(refused())
    for words in ("http://h/v1 in 10 s: connection refused", "langchain-art serve", "ART_BASE_URL"):
        assert words in str(caught.value)

    told = Waiting("http://h/v1", lambda _: None)
    told.answer(502)  # of a proxy: the server itself said nothing
    assert not told.answered
    told.answer(503)
    for asked in (False, True):
        one = Backoff(Waiting("http://h/v1") if asked else told, 300.0, asked=asked)
        clock.now += 299
        one.after(refused())
        clock.now += 1
        with pytest.raises(ServerUnreachable, match="in 300 s"):
            one.after(refused())
