"""The small model and a sampler without a process, for the tests that need no other."""

from pathlib import Path

import pytest

from tests.support.tiny_models import LocalSampler, save_model


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, as most tests are of what is around it; a file may say `LAYERS`."""
    layers = getattr(request.module, "LAYERS", 1)
    return save_model(tmp_path_factory.mktemp("models") / "qwen3", num_hidden_layers=layers)


@pytest.fixture
def sampler(model: Path) -> LocalSampler:
    return LocalSampler(model)
