"""Fixtures that everything shares. The server is the real one, with a real small model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live_server import FaultyServer, LiveServer, RuleServer


@pytest.fixture(scope="session")
def art_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server for the tests that need one and leave it as they found it."""
    server = LiveServer(tmp_path_factory.mktemp("server") / "data").start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rule_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuleServer]:
    """One server whose model follows rules (`tests.rule_model`): it says what a test scripts."""
    server = RuleServer(tmp_path_factory.mktemp("rules") / "data")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def faulty_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    """One server whose engines go wrong as a test tells them; healthy between tests."""
    server = FaultyServer(tmp_path_factory.mktemp("faulty") / "data")
    server.start()
    yield server
    server.stop()
