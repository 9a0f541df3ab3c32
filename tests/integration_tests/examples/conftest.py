"""The demo's server: here its model is the subject."""

from collections.abc import Iterator

import pytest

from tests.support.live_server import BASE_MODEL, ForkedServer, LiveServer


@pytest.fixture(scope="package")
def art_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server with all layers of the model: the first alone has no success to learn from."""
    with ForkedServer(tmp_path_factory.mktemp("demo") / "data", model=BASE_MODEL) as server:
        yield server
