"""Parts of transformers' Qwen3 without its casts to float32, which would end float64 at 1e-7."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3


def _norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Qwen3RMSNorm."""
    return (
        self.weight
        * hidden
        * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    )


def _attention(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention written out."""
    del mask  # one row without padding: causality is all there is
    k, v = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scaling
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -math.inf).softmax(-1) @ v).transpose(1, 2), None


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3 computes in float64 what it is given in float64; only rows without padding."""
    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", _norm)
    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", _attention)
