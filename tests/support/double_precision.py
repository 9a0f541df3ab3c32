"""Models of transformers without their casts to float32, which would end float64 at 1e-7."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers casts to float32 stays in float64."""
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
