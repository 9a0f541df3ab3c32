"""Estimates the memory that sampling and training need, without torch.

The activations that a backward pass keeps of each token are a weighted sum of a layer's sizes. The
weights were measured on the learner (bytes that autograd saves; Qwen3, Qwen2 and Llama, rank 8,
hidden sizes 64 to 512, relative error below 1 %). `test_memory_model.py` compares the estimate with
the peak memory of real steps on a CPU. On an H200 the peak of a step of Qwen3-8B's shape was 5 to
9 % above it (docs/gpu.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Bytes of a number.
WIDTH = {"float32": 4, "bfloat16": 2}
#: Bytes that a layer keeps of a token for each unit of its hidden size, its MLP, its queries and
#: its keys.
KEPT = {"float32": (16, 16, 12, 12), "bfloat16": (12, 8, 8, 7)}
#: Linear layers of a block, each with one LoRA product of `rank` numbers.
LINEARS = 7
#: A LoRA parameter, its gradient and Adam's two moments, in float32; on a bfloat16 base also the
#: rounded parameter that the model computes with.
LORA_BYTES = {"float32": 16, "bfloat16": 18}
#: Logits are computed in chunks of 2^24 elements (the learner's `CHUNK_ELEMENTS`), in float32, with
#: their softmax and their gradient.
LOGIT_BYTES = (1 << 24) * 4 * 3
#: Bytes of a weight in NF4: four bits, and the float32 scale of a block of 64.
NF4_BYTES = 0.5 + 4 / 64
#: Bytes of a LoRA weight that 8-bit Adam saves: two moments of float32, for two of one byte each
#: and a float32 scale for 256 of them.
ADAM_8BIT_SAVES = 2 * (4 - 1 - 4 / 256)
#: Layers of a sharded base that each GPU holds whole: the computed and the prefetched one.
GATHERED = 2
#: Bytes that glibc's heap holds at most for each byte that a step keeps on a CPU (heap
#: fragmentation). Measured: 1.3 to 2.2, varying from run to run (1.1 to 1.3 with
#: MALLOC_MMAP_THRESHOLD_=131072, where the step takes 40 % more CPU).
CPU_HEAP = 2.2


@dataclass(frozen=True)
class Savings:
    """What takes less memory, as the server's settings name it."""

    four_bits: bool = False  # quantization = "nf4"
    adam_8bit: bool = False  # optimizer = "adamw_8bit"
    offload: bool = False  # offload_activations = true


#: In which order they are tried: each costs more than the one before.
SAVINGS = (Savings(), Savings(four_bits=True), Savings(True, True, True))


@dataclass(frozen=True)
class Shape:
    """The sizes of a causal language model."""

    layers: int  # blocks
    hidden: int  # width of the residual stream
    intermediate: int  # width of the MLP; of an expert, in a mixture
    queries: int  # heads times their width
    keys: int  # key heads times their width
    vocabulary: int  # tokens
    tied: bool = False  # input and output embeddings are one matrix
    experts: int = 1  # MLPs of a block, shared ones included
    active: int = 1  # how many of them a token passes through

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Shape:
        """Read a model's ``config.json``. Raises KeyError if it lacks one of the sizes."""
        inner: Mapping[str, Any] = config.get("text_config") or config
        heads = inner["num_attention_heads"]
        width = inner.get("head_dim") or inner["hidden_size"] // heads
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next(filter(None, map(inner.get, counts)), 0)
        shared = (inner.get("n_shared_experts") or 0) if experts else 0
        narrow = inner.get("moe_intermediate_size") if experts else None
        return cls(
            layers=inner["num_hidden_layers"],
            hidden=inner["hidden_size"],
            intermediate=narrow or inner["intermediate_size"],
            queries=heads * width,
            keys=(inner.get("num_key_value_heads") or heads) * width,
            vocabulary=inner["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))),
            experts=max(1, experts + shared),
            active=max(1, (inner.get("num_experts_per_tok") or 0) + shared) if experts else 1,
        )

    @property
    def layer_parameters(self) -> int:
        """Weights of one block, without biases and norms."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        return attention + 3 * self.hidden * self.intermediate * self.experts

    @property
    def parameters(self) -> int:
        """Weights of the model, without biases and norms."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings

    def lora_parameters(self, rank: int) -> int:
        """Weights of an adapter on all linear layers."""
        attention = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys)
        mlp = 3 * (self.hidden + self.intermediate) * self.experts
        return self.layers * rank * (attention + mlp)


def base_bytes(shape: Shape, dtype: str, saving: Savings = SAVINGS[0]) -> int:
    """Bytes of the base's weights; in 4 bits with room for the largest matrix as it is computed.

    Embeddings and output head are never in 4 bits.
    """
    if not saving.four_bits:
        return shape.parameters * WIDTH[dtype]
    layers = shape.layers * shape.layer_parameters
    whole = shape.parameters - layers + shape.hidden * max(shape.intermediate, shape.queries)
    return int(layers * NF4_BYTES) + whole * WIDTH[dtype]


def idle_learner_bytes(
    shape: Shape, rank: int, dtype: str, shards: int = 1, saving: Savings = SAVINGS[0]
) -> int:
    """Bytes of a learner between two steps: the base, the adapter and its optimizer's state.

    A base in 4 bits is not sharded.
    """
    held = shape.layers if shards == 1 else math.ceil(shape.layers / shards) + GATHERED
    elsewhere = max(0, shape.layers - held) * shape.layer_parameters * WIDTH[dtype]
    each = LORA_BYTES[dtype] - (ADAM_8BIT_SAVES if saving.adam_8bit else 0)
    lora = int(each * shape.lora_parameters(rank))
    return base_bytes(shape, dtype, saving) - elsewhere + lora


def token_bytes(
    shape: Shape,
    rank: int,
    dtype: str,
    *,
    checkpointed: bool = False,
    saving: Savings = SAVINGS[0],
) -> int:
    """Bytes that a backward pass keeps of one token, over all layers.

    With gradient checkpointing (`checkpointed`) these are the inputs of each layer (unless the host
    has them), its keys and values, to which other rows attend, and all activations of the one layer
    that is computed again.
    """
    hidden, mlp, queries, keys = KEPT[dtype]
    wide = mlp * shape.intermediate * shape.active
    layer = hidden * shape.hidden + wide + queries * shape.queries + keys * shape.keys
    layer += LINEARS * rank * WIDTH[dtype]
    inputs = (0 if saving.offload else shape.hidden) + 2 * shape.keys
    return layer + shape.layers * inputs * WIDTH[dtype] if checkpointed else layer * shape.layers


def learner_bytes(
    shape: Shape,
    tokens: int,
    rank: int,
    dtype: str,
    *,
    checkpointed: bool = False,
    heap: float = 1.0,
    shards: int = 1,
    saving: Savings = SAVINGS[0],
) -> int:
    """Peak memory of a training step on each device, without that of the process itself.

    `tokens` are of a microbatch: the longest row at least, `tokens_per_microbatch` at most. `heap`
    is what the allocator holds for each byte in use (`CPU_HEAP` on a CPU), `shards` the GPUs over
    which the base's layers are sharded.
    """
    kept = token_bytes(shape, rank, dtype, checkpointed=checkpointed, saving=saving)
    logits = min(LOGIT_BYTES, tokens * shape.vocabulary * 4 * 3)
    idle = idle_learner_bytes(shape, rank, dtype, shards, saving)
    return idle + int(heap * tokens * kept) + logits


def sampler_bytes(
    shape: Shape, context: int, calls: int, dtype: str, saving: Savings = SAVINGS[0]
) -> int:
    """Weights, and the KV cache of `calls` concurrent calls of `context` tokens each.

    No prefix is shared between the calls. Memory of the process itself is not included.
    """
    cache = 2 * shape.layers * shape.keys * context * calls * WIDTH[dtype]
    return base_bytes(shape, dtype, saving) + cache


def longest_row(
    shape: Shape,
    budget: float,
    rank: int,
    dtype: str,
    heap: float = 1.0,
    shards: int = 1,
    saving: Savings = SAVINGS[0],
) -> int:
    """Tokens of the longest row that fits `budget` bytes, with gradient checkpointing, or 0."""
    fixed = idle_learner_bytes(shape, rank, dtype, shards, saving) + LOGIT_BYTES
    each = int(heap * token_bytes(shape, rank, dtype, checkpointed=True, saving=saving))
    return max(0, int((budget - fixed) / each))
