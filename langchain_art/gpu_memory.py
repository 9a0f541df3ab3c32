"""This machine's GPUs, and how much of their memory a sampler and a learner need. No torch.

vLLM takes its memory when it starts, before the learner has taken a step that could be measured. So
the server computes what to leave to the learner, and the doctor says the same numbers. The
activations that a backward pass keeps of each token are a weighted sum of a layer's sizes. The
weights were measured on the learner (bytes that autograd saves; Qwen3, Qwen2 and Llama, rank 8,
hidden sizes 64 to 512, relative error below 1 %). `test_memory_model.py` compares the sum with
the peak memory of real steps on a CPU. On an H200 the peak of a step of Qwen3-8B's shape was 5 to
9 % above it (docs/gpu.md).
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

#: Bytes of a number.
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Bytes that a layer keeps of a token for each unit of its hidden size, its MLP, its queries and
#: its keys.
KEPT = {"float32": (16, 16, 12, 12), **dict.fromkeys(("bfloat16", "float16"), (8, 8, 6, 6))}
#: Linear layers of a block, each with one LoRA product of `rank` numbers.
LINEARS = 7
#: A LoRA parameter, its gradient and Adam's two moments, in float32; on a base in 16 bits also the
#: rounded parameter that the model computes with.
LORA_BYTES = {"float32": 16, "bfloat16": 18, "float16": 18}
#: Logits are computed in chunks of 2^24 elements (the learner's `CHUNK_ELEMENTS`), in float32, with
#: their softmax and their gradient.
LOGIT_BYTES = (1 << 24) * 4 * 3
#: Bytes of a weight in NF4: four bits, and the float32 scale of a block of 64.
NF4_BYTES = 0.5 + 4 / 64
#: Layers of a sharded base that each GPU holds whole: the computed and the prefetched one.
GATHERED = 2
#: Bytes that glibc's heap holds at most for each byte that a step keeps on a CPU (heap
#: fragmentation). Measured: 1.3 to 2.2, varying from run to run (1.1 to 1.3 with
#: MALLOC_MMAP_THRESHOLD_=131072, where the step takes 40 % more CPU).
CPU_HEAP = 2.2
#: Bytes of an engine's process without a model: libraries, CUDA context, work space.
PROCESS_BYTES = 3 * 10**9 // 2
#: The same of vLLM: also its CUDA graphs and the activations of its largest batch.
VLLM_BYTES = 4 * 10**9
#: Shortest context that is chosen where a longer one does not fit.
LEAST_CONTEXT = 2048
#: Most of a GPU's memory that vLLM is given where it has the GPU for itself.
MOST_SHARE = 0.9
#: Sampler and learner at once on one GPU; on one while vLLM sleeps during a step (``take_turns``);
#: on a GPU each (``device``).
Placement = Literal["together", "in turns", "separate"]
_QUERY = "--query-gpu=name,memory.total,memory.free,driver_version,compute_cap"
#: NVIDIA's compute capability from which on a GPU computes in bfloat16 (Ampere).
BFLOAT16_FROM = 8.0


def gpus() -> list[dict[str, Any]]:
    """Name, total and free memory in bytes, driver and capability of each GPU that CUDA may use.

    ``nvidia-smi`` is asked: nothing of CUDA is loaded here. ``CUDA_VISIBLE_DEVICES`` chooses and
    orders them. None if there is no ``nvidia-smi``, or it fails, as it does for the names of parts
    of a GPU (MIG).
    """
    tool, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if tool is None or visible == "":
        return []
    found: list[dict[str, Any]] = []
    for one in visible.split(",") if visible else [None]:
        argv = [tool, _QUERY, "--format=csv,noheader,nounits", *(["-i", one] if one else [])]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        if done.returncode:
            return []
        for line in done.stdout.splitlines():
            name, total, free, driver, capability = line.split(", ")
            sizes = {"total": int(total) << 20, "free": int(free) << 20}
            about = {"driver": driver, "capability": float(capability)}
            found.append({"name": name, **sizes, **about})
    return found


def half_precision(cards: Sequence[Mapping[str, Any]]) -> Literal["bfloat16", "float16"]:
    """The dtype of bases on such GPUs (`gpus`): float16 if one of them has no bfloat16.

    T4, V100 and RTX 20 have none; sampler and learner may be on different GPUs, and compute alike.
    """
    old = any(card["capability"] < BFLOAT16_FROM for card in cards)
    return "float16" if old else "bfloat16"


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


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that the two engines of one model need on a device, without their processes."""

    shape: Shape
    dtype: str  # of the weights: a key of `WIDTH`
    rank: int  # of the adapter
    shards: int = 1  # GPUs that the learner's base is sharded over
    four_bits: bool = False  # quantization = "nf4"; such a base is not sharded
    offload: bool = False  # offload_activations = true
    cpu: bool = False  # the device is one, and the sampler the embedded engine

    @property
    def weights(self) -> int:
        """The base; in 4 bits with room for the largest matrix as it is computed.

        Embeddings and output head are never in 4 bits.
        """
        shape = self.shape
        if not self.four_bits:
            return shape.parameters * WIDTH[self.dtype]
        layers = shape.layers * shape.layer_parameters
        whole = shape.parameters - layers + shape.hidden * max(shape.intermediate, shape.queries)
        return int(layers * NF4_BYTES) + whole * WIDTH[self.dtype]

    def sampler(self, context: int) -> int:
        """Weights, and a KV cache for one call of `context` tokens.

        On a CPU also the copies of linear layers and output head that `RowLinear` multiplies by,
        those of small layers included, which have none.
        """
        shape, copied = self.shape, 0
        cache = 2 * shape.layers * shape.keys * context * WIDTH[self.dtype]
        if self.cpu and self.dtype == "float32" and shape.experts == 1 and not self.four_bits:
            copied = shape.layers * shape.layer_parameters + shape.vocabulary * shape.hidden
        return self.weights + copied * WIDTH[self.dtype] + cache

    @property
    def idle(self) -> int:
        """A learner between two steps: the base, the adapter and AdamW's state in 32 bits."""
        shape = self.shape
        held = math.ceil(shape.layers / self.shards) + (GATHERED if self.shards > 1 else 0)
        elsewhere = max(0, shape.layers - held) * shape.layer_parameters * WIDTH[self.dtype]
        return self.weights - elsewhere + LORA_BYTES[self.dtype] * shape.lora_parameters(self.rank)

    def token(self, *, checkpointed: bool = True) -> int:
        """Bytes that a backward pass keeps of one token, over all layers.

        With gradient checkpointing these are the inputs of each layer (unless the host has them),
        its keys and values, to which other rows attend, and all activations of the one layer that
        is computed again.
        """
        shape, (hidden, mlp, queries, keys) = self.shape, KEPT[self.dtype]
        wide = mlp * shape.intermediate * shape.active
        layer = hidden * shape.hidden + wide + queries * shape.queries + keys * shape.keys
        layer += LINEARS * self.rank * WIDTH[self.dtype]
        if not checkpointed:
            return layer * shape.layers
        inputs = (0 if self.offload else shape.hidden) + 2 * shape.keys
        return layer + shape.layers * inputs * WIDTH[self.dtype]

    def step(self, tokens: int, *, checkpointed: bool = True) -> int:
        """The learner's peak in a training step with micro-batches of `tokens`."""
        heap = CPU_HEAP if self.cpu else 1.0
        kept = int(heap * tokens * self.token(checkpointed=checkpointed))
        return self.idle + kept + min(LOGIT_BYTES, tokens * self.shape.vocabulary * 4 * 3)


class VllmShare(NamedTuple):
    """vLLM's part of a GPU."""

    gpu_memory: float
    """Fraction of all of the GPU's memory."""
    context: int
    """Tokens of the longest call that its cache holds and the learner can learn from."""


def vllm_share(
    needs: MemoryNeeds,
    placement: Placement,
    *,
    total: int,
    free: int,
    context: int,
    cards: int = 1,
    exact: bool = False,
    given: float | None = None,
) -> VllmShare | None:
    """The share of a GPU that vLLM gets beside the learner, and the longest context then.

    None if no context of `LEAST_CONTEXT` tokens fits.

    Args:
        needs: of the two engines.
        placement: of the two.
        total: bytes of the GPU; of several, the smallest.
        free: of these, before either of the two starts.
        context: tokens of a call; if they do not fit, half as many, and so on, unless `exact`.
        cards: GPUs that vLLM's weights and cache are spread over (tensor parallelism).
        exact: `context` was asked for.
        given: a share that was chosen already; None: all that the learner leaves.
    """
    idle = needs.idle + PROCESS_BYTES
    while True:
        step = needs.step(context) + PROCESS_BYTES
        beside = {"together": step, "in turns": idle}.get(placement, 0)
        left = min(free - beside, MOST_SHARE * total) if given is None else given * total
        alone = step + (VLLM_BYTES if placement == "in turns" else 0)
        serves = VLLM_BYTES + needs.sampler(context) / cards <= left
        if serves and left + beside <= free and alone <= free:
            return VllmShare(int(left / total * 1000) / 1000, context)
        if exact or context // 2 < LEAST_CONTEXT:
            return None
        context //= 2
