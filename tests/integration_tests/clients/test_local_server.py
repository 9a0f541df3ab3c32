"""A server that a program starts for itself: waited for, started again, and said so."""

from __future__ import annotations

import logging
import os
import signal
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

from langchain_art.client.local_server import LocalServer
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ServerUnreachable
from tests.support.live_server import BASE_MODEL


def test_a_server_that_dies_is_started_again_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "langchain_art.client.local_server")
    with LocalServer(BASE_MODEL, policies=["mine"], data_dir=tmp_path / "data") as server:
        first = server.pid
        assert first is not None
        with ArtClient(server.base_url, patience=60) as client:
            assert client.policy("mine").version == 0
            os.kill(first, signal.SIGKILL)
            while server.restarts == 0:
                time.sleep(0.02)
            assert client.policy("mine").version == 0
        assert server.pid != first
    (line,) = [said for said in caplog.messages if not said.startswith(("waiting", "http"))]
    assert line.startswith("The local server ended with status -9 and is started again")
    assert str(server.log) in line


def test_a_server_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking whether it is ready takes no new TLS context each time, which is 20 ms of CPU."""
    contexts: list[ssl.SSLContext] = []
    create = ssl.create_default_context

    def counted(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        contexts.append(create(*args, **kwargs))
        return contexts[-1]

    monkeypatch.setattr(ssl, "create_default_context", counted)
    model = tmp_path / ("a" * 80) / "no-model"
    with (
        pytest.raises(ServerUnreachable, match="did not start") as refused,
        LocalServer(model, data_dir=tmp_path / "data"),
    ):
        pass
    assert "no-model" in str(refused.value).split("It said:")[1]
    assert f"got the model '{model}', but {model} does not" in str(refused.value)  # not wrapped
    assert len(contexts) <= 1
