"""The small model and a sampler without a process, for the tests that need no other."""

from pathlib import Path

import pytest

from tests.support.tiny_models import LocalSampler, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def sampler(model: Path) -> LocalSampler:
    return LocalSampler(model)
