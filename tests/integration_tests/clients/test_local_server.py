"""A server that a program starts for itself: waited for, started again, and said so."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from langchain_art.client.local_server import LocalServer
from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import ServerUnreachable
from tests.support import forked_start
from tests.support.live_server import BASE_MODEL

#: The server over engines that compute nothing: the subject is its process.
STUBS = "tests.support.stub_engines"


@pytest.fixture(autouse=True)
def quick_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_SECONDS", "0 0")


def test_a_server_that_dies_or_was_stopped_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "langchain_art.client.local_server")
    monkeypatch.setattr(LocalServer, "_spawn", forked_start.spawn)
    server = LocalServer(BASE_MODEL, policies=["mine"], data_dir=tmp_path / "data")
    server._argv[2] = STUBS
    for life in range(1, 3):
        with server, ArtClient(server.base_url, patience=300) as client:
            first = server.pid
            assert first is not None
            assert server.start().pid == first  # a notebook's cell that is run twice
            assert client.policy("mine").version == 0
            os.kill(first, signal.SIGKILL)
            while server.restarts < life:
                time.sleep(0.02)
            assert client.policy("mine").version == 0
            assert (second := server.pid) not in (None, first)
        assert second is not None and not psutil.pid_exists(second)
    lines = [said for said in caplog.messages if not said.startswith(("waiting", "http"))]
    for line in lines:
        assert line.startswith("The local server ended with status -9 and is started again")
        assert str(server.log) in line
    assert len(lines) == 2


def test_a_server_ends_with_its_program_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from langchain_art.client.local_server import LocalServer\n"
        "server = LocalServer(sys.argv[1], data_dir=sys.argv[2])\n"
        "server._argv[2] = sys.argv[3]\n"
        "with server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    argv = [sys.executable, "-c", program, str(BASE_MODEL), str(tmp_path / "data"), STUBS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        server = psutil.Process(int(started.stdout.readline()))
        processes = [server, *server.children(recursive=True)]
        started.kill()
    for one in processes:
        one.wait(60)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    model = tmp_path / ("a" * 80) / "no-model"
    with (
        pytest.raises(ServerUnreachable, match="did not start") as refused,
        LocalServer(model, data_dir=tmp_path / "data"),
    ):
        pass
    assert "no-model" in str(refused.value).split("It said:")[1]
    assert f"got the model '{model}', but {model} does not" in str(refused.value)  # not wrapped
