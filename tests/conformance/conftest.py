"""Small random models for the learner's tests, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.double_precision import exact
from tests.support.learner_cases import save_models
from tests.support.vllm_sampling import vllm_adapters, vllm_model, vllm_sampler

__all__ = ["exact", "vllm_adapters", "vllm_model", "vllm_sampler"]  # fixtures


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny(models: dict[str, Path]) -> str:
    return str(models["qwen3"])
