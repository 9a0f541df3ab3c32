"""The learner's gradient and logits against naive computations, over architectures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from langchain_art.wire import TrainConfig
from langchain_art_server.algorithms.samples import Row
from langchain_art_server.backends.peft_engine import PeftEngine
from langchain_art_server.backends.peft_forward import collate, load_base, selected_logits
from tests.conformance.learner_cases import (
    CONFIGS,
    fresh,
    jittered,
    make_rows,
    on_policy,
    quiet,
    shake,
)


def double_norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Qwen3RMSNorm without its cast to float32, which would end a float64 check at 1e-7."""
    return (
        self.weight
        * hidden
        * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    )


def double_attention(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention written out, again without transformers' softmax in float32."""
    del mask  # one row without padding: causality is all there is
    k, v = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scaling
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -math.inf).softmax(-1) @ v).transpose(1, 2), None


def naive_gradient(
    model_path: str, adapter: Path, rows: list[Row], config: TrainConfig
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss in float64: row by row, unpadded, eager attention, one token at a time."""
    base = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float64, attn_implementation="eager"
    )
    model = peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True).double().eval()
    n, total = sum(sum(row.mask) for row in rows), torch.zeros((), dtype=torch.float64)
    for row in rows:
        logits_TV = model(torch.tensor([row.token_ids])).logits[0]
        for t in range(1, len(row.token_ids)):
            if not row.mask[t]:
                continue
            z_V = logits_TV[t - 1] / row.temperature
            new = z_V[row.token_ids[t]] - torch.log(torch.exp(z_V).sum())
            ratio = torch.exp(new - row.logprobs[t])
            bound = min(max(ratio.item(), 1 - config.clip_low), 1 + config.clip_high)
            a = row.advantages[t]
            total = total - (ratio * a if ratio.item() * a <= bound * a else bound * a) / n
    total.backward()
    return total.item(), {
        name.replace(".default", ""): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 2e-5), ("float64", 1e-9)], ids=["float32", "float64"]
)
def test_the_gradient_equals_a_naive_float64_computation(
    dtype: str, tolerance: float, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", double_norm)
    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", double_attention)
    engine = PeftEngine(tiny, dtype=dtype)
    adapter = shake(fresh(engine, tmp_path))
    rows = make_rows(5, seed=1, temperature=0.7) + make_rows(4, seed=2)
    rows = jittered(on_policy(engine, adapter, rows), 0.4)
    config = TrainConfig(tokens_per_microbatch=64)
    engine._hold(adapter)
    loss, stats, padded = engine.accumulate(rows, config, quiet)
    expected_loss, expected = naive_gradient(tiny, adapter, rows, config)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert set(expected) == set(engine.parameters) and len(expected) == 28
    for name, parameter in engine.parameters.items():
        assert parameter.grad is not None
        error = (parameter.grad.double() - expected[name]).norm() / expected[name].norm()
        assert error < tolerance, (name, error)
    metrics = stats.metrics()
    assert 0.02 < metrics["clip_low_fraction"] < 0.5 and 0.02 < metrics["clip_high_fraction"] < 0.5
    assert padded > sum(len(row.token_ids) for row in rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_and_micro_batches_change_nothing(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    engine = PeftEngine(str(models[name]))
    adapter, rows = shake(fresh(engine, tmp_path)), make_rows(9, seed=6, temperature=1.3)
    engine._hold(adapter)
    gradients, losses = [], []
    for tokens in (64, 10_000):
        loss, _, _ = engine.accumulate(rows, TrainConfig(tokens_per_microbatch=tokens), quiet)
        losses.append(loss)
        gradients.append({n: p.grad.clone() for n, p in engine.parameters.items()})
        for parameter in engine.parameters.values():
            parameter.grad = None
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for key, gradient in gradients[0].items():
        error = (gradient - gradients[1][key]).norm() / gradient.norm()
        assert error < 2e-5, key
    together = engine.logprobs(adapter, rows)
    for row, own in zip(rows, together, strict=True):
        (alone,) = engine.logprobs(adapter, [row])
        assert own.tolist() == pytest.approx(alone.tolist(), abs=5e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_selected_logits_are_the_models_own(name: str, models: dict[str, Path]) -> None:
    base = load_base(str(models[name]), torch.float32, torch.device("cpu"))
    rows = make_rows(4, seed=8)
    batch = collate(rows, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        got_MV = selected_logits(base, base, batch)
        own = [base(torch.tensor([row.token_ids])).logits[0] for row in rows]
    expected_MV = torch.stack(
        [own[b][t - 1] for b, row in enumerate(rows) for t, m in enumerate(row.mask) if m]
    )
    torch.testing.assert_close(got_MV, expected_MV, rtol=1e-5, atol=1e-5)
    if name == "gemma3":
        assert expected_MV.abs().max() <= 3.0  # soft-capped, and reaching for it
        assert expected_MV.abs().max() > 1.0
    assert not base.get_output_embeddings()._forward_pre_hooks
