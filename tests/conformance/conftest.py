"""Small random models, made once, and who asks the server whose model follows rules."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from langchain_art.client.sync_client import ArtClient
from tests.support.learner_cases import save_models
from tests.support.live_server import RuleServer
from tests.support.vllm_sampling import vllm_adapters, vllm_model, vllm_sampler

__all__ = ["vllm_adapters", "vllm_model", "vllm_sampler"]  # fixtures


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny(models: dict[str, Path]) -> str:
    return str(models["qwen3"])


@pytest.fixture(scope="module")
def client(rule_server: RuleServer) -> Iterator[ArtClient]:
    with ArtClient(rule_server.base_url) as client:
        yield client


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers casts to float32, which would end float64 at 1e-7, stays in float64."""
    plain = torch.Tensor.to

    def to(self: Tensor, *how: Any, **more: Any) -> Tensor:
        if self.dtype == torch.float64:
            how = tuple(torch.float64 if one is torch.float32 else one for one in how)
        return plain(self, *how, **more)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: to(self, torch.float32))
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim, dtype=x.dtype)
    )
