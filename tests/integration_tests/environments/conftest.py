"""A server for environments' fits."""

from collections.abc import Iterator

import pytest

from tests.support.live_server import ForkedServer, LiveServer
from tests.support.tiny_models import save_model


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One whose model is random, and says any number."""
    folder = tmp_path_factory.mktemp("numbers")
    model = save_model(folder / "model", max_position_embeddings=4096)
    with ForkedServer(folder / "data", model=model) as started:
        yield started
