"""Shapes of models that people train, written out so that nothing is downloaded.

From the ``config.json`` of Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B; weights are random.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)


def qwen25_7b() -> PretrainedConfig:
    """Qwen2.5-7B: 7.6 billion parameters."""
    return Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    )


def qwen3_8b() -> PretrainedConfig:
    """Qwen3-8B: 8.2 billion parameters."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    )


def small() -> PretrainedConfig:
    """A Qwen3 of 1.3 million parameters, to prove the script on a CPU."""
    return Qwen3Config(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2.5-7b": qwen25_7b,
    "qwen3-8b": qwen3_8b,
    "small": small,
}


def random_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """A frozen model of that shape with random weights, made where it will be."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def step_flops(
    config: PretrainedConfig, tokens: int, attended: int, predicted: int, rank: int
) -> float:
    """Floating-point operations that a LoRA step needs, a multiplication and an addition being two.

    Forward and backward to the inputs (2 + 2 per frozen weight and token, since frozen weights need
    no gradient of their own), 2 + 4 per weight of the adapter; attention 4 per pair, head and
    dimension forward and twice that backward; the output head at predicted tokens only. What is
    computed a second time (checkpointing, chunks of logits) is not counted: it is the
    implementation's choice.

    Args:
        config: of the model.
        tokens: that go through the layers.
        attended: pairs of a token and one that it attends to, itself included.
        predicted: positions whose logits are needed.
        rank: of the adapter, on all linear layers.
    """
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * width, config.num_key_value_heads * width
    linears = [
        *((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)),
        *((hidden, inner), (hidden, inner), (inner, hidden)),
    ]
    frozen = sum(a * b for a, b in linears)
    adapter = sum(rank * (a + b) for a, b in linears)
    per_layer = tokens * (4 * frozen + 6 * adapter) + 12 * queries * attended
    return float(layers * per_layer + 4 * hidden * config.vocab_size * predicted)
