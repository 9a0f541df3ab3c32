"""Unit tests open no socket: what talks to a server is an integration test."""

from collections.abc import Iterator

import pytest
from pytest_socket import disable_socket, enable_socket


@pytest.fixture(autouse=True)
def no_sockets() -> Iterator[None]:
    """A socket other than a Unix one (which event loops need) raises SocketBlockedError."""
    disable_socket(allow_unix_socket=True)
    yield
    enable_socket()
