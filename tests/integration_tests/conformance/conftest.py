"""Our server with the conformance model."""

from collections.abc import Iterator

import pytest

from tests.conformance.suite.model import write_model
from tests.support.live_server import ForkedServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedServer]:
    folder = tmp_path_factory.mktemp("conformance")
    with ForkedServer(folder / "data", model=write_model(folder / "model")) as made:
        yield made
