"""A data directory that tests break copies of, made once."""

from pathlib import Path

import pytest

from tests.support.stored_step import stored


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions of a policy, and runs for two more steps; no server runs on it."""
    return stored(tmp_path_factory.mktemp("stored"))
