"""Where the sampler and the learner of a model fit into GPUs, and the server's settings for that.

No torch here. On a GPU nothing of it has been measured.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from langchain_art.hardware.memory_estimate import (
    CPU_HEAP,
    SAVINGS,
    Savings,
    Shape,
    idle_learner_bytes,
    learner_bytes,
    longest_row,
    sampler_bytes,
)
from langchain_art.wire import Wire

#: Bytes of an engine's process without a model: libraries, CUDA context, work space.
PROCESS_BYTES = 3 * 10**9 // 2
#: The same of vLLM: also its CUDA graphs and the activations of its largest batch.
VLLM_BYTES = 4 * 10**9
#: Most GPUs that the learner's base is sharded over in an estimate.
MOST_SHARDS = 8
#: Shortest context that is proposed where the asked one does not fit.
LEAST_CONTEXT = 2048
#: Most of a GPU's memory that vLLM is given where it has the GPU for itself.
MOST_SHARE = 0.9
Placement = Literal["together", "in turns", "separate", "sharded"]


class MemoryFit(Wire):
    """How the sampler and the learner of one model fit into memory."""

    model: str
    parameters: int
    dtype: str
    sampler_bytes: int
    learner_bytes: int
    """Of a step with one row of the asked context, with gradient checkpointing."""
    placement: Placement | None
    """The first that fits, None if none does. ``together``: both on one device at once. ``in
    turns``: vLLM sleeps during a step (``take_turns``). ``separate``: on a GPU each (``device``).
    ``sharded``: separate, with the learner's base over several GPUs (``ranks``, ``shard``)."""
    devices: int
    """GPUs of equal size that this takes (1 on a CPU); 0 if nothing fits."""
    replicas: int = 1
    """vLLMs, on a GPU each (``[sampler] replicas``); the learner has the GPUs after theirs."""
    longest_row: int
    """Tokens of the longest row that the learner can train then; 0 if nothing fits."""
    context: int
    """Tokens of a call, which the server is to be told (``max_model_len``)."""
    calls: int
    """Calls of so many tokens whose keys and values fit at once; more wait, or are shorter."""
    quantization: Literal["nf4"] | None = None
    """``nf4``: the base is in 4 bits in both."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    offload_activations: bool = False

    @property
    def saving(self) -> Savings:
        """These settings for an estimate."""
        eight = self.optimizer == "adamw_8bit"
        return Savings(self.quantization == "nf4", eight, self.offload_activations)


def fit(
    name: str,
    shape: Shape,
    memory: int,
    *,
    gpu: bool,
    context: int,
    calls: int,
    rank: int,
    saving: Savings = SAVINGS[0],
) -> MemoryFit:
    """How a model fits into devices with `memory` free bytes each: any number of GPUs, or a CPU."""
    dtype, heap = ("bfloat16", 1.0) if gpu else ("float32", CPU_HEAP)
    sampler = sampler_bytes(shape, context, calls, dtype, saving)
    learner, *sharded = (
        learner_bytes(
            shape,
            context,
            rank,
            dtype,
            checkpointed=True,
            heap=heap,
            shards=shards,
            saving=saving,
        )
        for shards in range(1, MOST_SHARDS + 1)
    )
    asleep = idle_learner_bytes(shape, rank, dtype, saving=saving)
    program = VLLM_BYTES if gpu else PROCESS_BYTES
    both, alone = memory - program - PROCESS_BYTES, memory - PROCESS_BYTES
    serves = sampler + program <= memory
    placement: Placement | None = None
    devices = budget = 0
    if sampler + learner <= both:
        placement, devices, budget = "together", 1, both - sampler
    elif gpu and max(sampler + asleep, learner) <= both:
        placement, devices, budget = "in turns", 1, both
    elif gpu and serves and learner <= alone:
        placement, devices, budget = "separate", 2, alone
    elif gpu and serves and sharded[-1] <= alone and not saving.four_bits:
        shards = next(n for n, needed in enumerate(sharded, 2) if needed <= alone)
        placement, devices, budget = "sharded", shards + 1, alone
    return MemoryFit(
        model=name,
        parameters=shape.parameters,
        dtype=dtype,
        sampler_bytes=sampler,
        learner_bytes=learner,
        placement=placement,
        devices=devices,
        longest_row=longest_row(
            shape,
            budget,
            rank,
            dtype,
            heap,
            devices - 1 if placement == "sharded" else 1,
            saving,
        ),
        context=context,
        calls=calls,
        quantization="nf4" if saving.four_bits else None,
        optimizer="adamw_8bit" if saving.adam_8bit else "adamw",
        offload_activations=saving.offload,
    )


def best_fit(
    name: str,
    shape: Shape,
    memory: int,
    devices: int,
    *,
    gpu: bool,
    context: int,
    calls: int,
    rank: int,
) -> MemoryFit:
    """`fit` on so many devices, with fewer calls at once and then less context if it takes that.

    On GPUs then with the base of a dense model in 4 bits, and with all `SAVINGS`. If nothing fits,
    that of the asked context and calls.
    """
    asked = fit(name, shape, memory, gpu=gpu, context=context, calls=calls, rank=rank)
    for saving in SAVINGS if gpu and shape.experts == 1 else SAVINGS[:1]:
        tokens = context
        while tokens >= min(context, LEAST_CONTEXT):
            held = calls
            while held:
                one = fit(
                    name,
                    shape,
                    memory,
                    gpu=gpu,
                    context=tokens,
                    calls=held,
                    rank=rank,
                    saving=saving,
                )
                if 0 < one.devices <= devices:
                    return one
                held //= 2
            tokens //= 2
    return asked


def over_gpus(found: MemoryFit, shape: Shape, memory: int, cards: int, rank: int) -> MemoryFit:
    """A fit that uses all of `cards` GPUs (more than 1) with `memory` free bytes each.

    A vLLM on each but those of the learner, which has them for itself.
    """
    learning = found.devices - 1 if found.placement == "sharded" else 1
    row = longest_row(
        shape,
        memory - PROCESS_BYTES,
        rank,
        found.dtype,
        shards=learning,
        saving=found.saving,
    )
    changes = {"devices": cards, "replicas": cards - learning, "longest_row": row}
    if found.placement != "sharded":
        changes |= {"placement": "separate"}
    return found.model_copy(update=changes)


class Share(NamedTuple):
    """vLLM's part of a GPU."""

    gpu_memory: float
    """Of all of the GPU's memory."""
    context: int
    """Tokens of the longest call that its cache holds and the learner can learn from."""


def vllm_share(
    shape: Shape,
    placement: Placement,
    *,
    total: int,
    free: int,
    dtype: str,
    rank: int,
    context: int,
    shards: int = 1,
    cards: int = 1,
    exact: bool = False,
    given: float | None = None,
    saving: Savings = SAVINGS[0],
) -> Share | None:
    """The share of a GPU that vLLM gets beside the learner, and the longest context then.

    Args:
        shape: of the model.
        placement: of the two.
        total: bytes of the GPU; of several, the smallest.
        free: of these, before either of the two starts.
        dtype: of the weights, ``float32`` or ``bfloat16``.
        rank: of the adapter.
        context: tokens of a call; if they do not fit, half as many, and so on, unless `exact`.
        shards: GPUs that the learner's base is sharded over.
        cards: GPUs that vLLM's weights and cache are spread over (tensor parallelism).
        exact: `context` was asked for.
        given: a share that was chosen already; None: all that the learner leaves.
        saving: of the settings.

    Returns:
        None if no context of `LEAST_CONTEXT` tokens fits.
    """
    idle = idle_learner_bytes(shape, rank, dtype, shards, saving) + PROCESS_BYTES
    while True:
        step = PROCESS_BYTES + learner_bytes(
            shape, context, rank, dtype, checkpointed=True, shards=shards, saving=saving
        )
        left = _left(placement, step, idle, total, free) if given is None else given * total
        beside = {"together": step, "in turns": idle}.get(placement, 0)
        alone = step + (VLLM_BYTES if placement == "in turns" else 0)
        serves = VLLM_BYTES + sampler_bytes(shape, context, 1, dtype, saving) / cards <= left
        if serves and left + beside <= free and alone <= free:
            return Share(_floor(left / total), context)
        if exact or context // 2 < LEAST_CONTEXT:
            return None
        context //= 2


def _left(placement: Placement | None, step: int, idle: int, total: int, free: int) -> float:
    """Bytes that the learner leaves vLLM: of a step beside it, or of its weights while it waits."""
    beside = {"together": step, "in turns": idle}.get(placement or "", 0)
    return min(free - beside, MOST_SHARE * total)


def _floor(share: float) -> float:
    return int(share * 1000) / 1000


def server_toml(found: MemoryFit, shape: Shape, rank: int, total: int, free: int) -> str:
    """The server's settings for a fit on GPUs of `total` bytes each, `free` of which are free.

    vLLM takes its share of all of the memory, and of what the learner leaves as much as there is.
    """
    idle = idle_learner_bytes(shape, rank, found.dtype, saving=found.saving) + PROCESS_BYTES
    step = found.learner_bytes + PROCESS_BYTES
    share = _floor(_left(found.placement, step, idle, total, free) / total)
    lines = [f'model = "{found.model}"', f"max_model_len = {found.context}"]
    if found.quantization:
        lines.append(f'quantization = "{found.quantization}"')
    if found.placement == "in turns":
        lines.append("take_turns = true")
    if found.devices > 1:
        lines.append(f'device = "cuda:{found.replicas}"')
    lines += [f"\n[lora]\nrank = {rank}"]
    lines += [f'\n[sampler]\nkind = "vllm"\ngpu_memory = {share}']
    if found.replicas > 1:
        lines.append(f"replicas = {found.replicas}")
    if found.placement == "sharded":
        lines.append(f"\n[learner]\nranks = {found.devices - found.replicas}\nshard = true")
    if found.offload_activations:
        lines.append(f'\n[learner]\noptimizer = "{found.optimizer}"\noffload_activations = true')
    return "\n".join(lines) + "\n"
