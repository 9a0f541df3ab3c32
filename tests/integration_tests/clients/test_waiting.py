"""A server that is not there, or takes connections and says nothing: said at once, and an error."""

import io
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from langchain_art import ArtClient, Trainer
from langchain_art.errors import ServerUnreachable


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langchain_art.client.http_request.FIRST_ANSWER", 1.0)
    monkeypatch.setattr("langchain_art.client.http_request.SILENCE", 0.1)


@pytest.fixture(params=["nobody", "silent"])
def base_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        if request.param == "nobody":
            listening.close()
        yield f"http://127.0.0.1:{port}/v1"


def test_a_fit_without_a_server_is_not_silent_and_ends(base_url: str, tmp_path: Path) -> None:
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


def test_a_plain_client_says_it_too(base_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        ArtClient(base_url) as client,
        pytest.raises(ServerUnreachable),
    ):
        client.ready()
    assert f"waiting for {base_url}: " in caplog.text
