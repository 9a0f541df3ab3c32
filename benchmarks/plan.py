"""What a learning step of Qwen3-8B on an H200 is laid out as: parts, tokens, forward passes.

Nothing runs on a card. The packer is told the card's free memory, the model's bytes a token
(`gpu_memory`) and its costs (`packer.COSTS`), and lays out the rows of `learning.workloads`.
Seconds are those of the model of costs, and no measurement.

Figures:

- parts: of the step of 32 scenarios;
- forwards: tokens that go forward through the model, the trust region's sample included, over those
  of the step, which is not shortened, on average over samples; the larger one of a default step and
  that of 32 scenarios;
- forest_over_rows: seconds of the forest over those of packed rows by the model of costs, the worst
  of eight runs of 1,024 to 16,384 tokens that share a quarter;
- saved_bytes_ratio: bytes kept of a token for the backward pass where what is cheap is computed
  again, over those that transformers' layers keep, in bfloat16 (`recompute`).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.gpu.learner import core_of
from benchmarks.gpu.shapes import qwen3_8b, random_model
from benchmarks.learning.methods import CONFIG, LORA, make_core, packed
from benchmarks.learning.workloads import WORKLOADS, default_step, large_step
from langchain_art.gpu_memory import MemoryNeeds, Shape
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft import packer
from langchain_art_server.backends.peft.forest.packing import token_cost
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.packer import WORK, Packer, Way, part_costs
from langchain_art_server.backends.peft.training_batch import WHOLE

#: Bytes of an H200.
CARD = 149.2e9
SAMPLES = 32
CONTEXTS = (1024, 2048, 4096, 8192, 16384)
console = Console()


def kept_ratios() -> tuple[float, float]:
    """Bytes kept of a token with cheap parts computed again, at an eighth of the size.

    Over those of what the learner keeps else, and over those of transformers' layers.
    """
    shape = qwen3_8b().to_dict() | {"hidden_size": 512, "intermediate_size": 1536}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 512}
    model = random_model(Qwen3Config(**shape), torch.bfloat16, torch.device("cpu"))
    packer = core_of(model, "qwen3-8b").packer
    again, plain = packer._measured(Way.AGAIN), packer._measured()
    for module in model.modules():
        vars(module).pop("forward", None)
    return again / plain, again / packer._measure()


def on_the_card(core: LearnerCore, ratio: float, stack: ExitStack) -> None:
    """Give the learner's packer the sizes of Qwen3-8B on an H200 to itself."""
    kept = {Way.PLAIN: 1.0, Way.AGAIN: ratio}
    config = qwen3_8b()
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    needs = MemoryNeeds(Shape.of_config(config.to_dict()), "bfloat16", LORA.rank)
    told: dict[str, Any] = {
        "_device": torch.device("cuda"),
        "_measured": lambda _, way=Way.PLAIN: needs.token(checkpointed=False) * kept[way],
        "_checkpointed": lambda *_: float(needs.token()),
        "peak": lambda _, kept: kept + WORK * needs.token(checkpointed=False) / needs.shape.layers,
    }
    for name, value in told.items():
        stack.enter_context(mock.patch.object(Packer, name, value))
    stack.enter_context(mock.patch.object(packer, "free_bytes", lambda _: CARD - needs.idle))
    core.packer.costs, core.packer.token_cost = part_costs(base, "cuda"), token_cost(base)


def planned(core: LearnerCore, rows: Sequence[Row]) -> dict[str, float]:
    """What a step of these rows is laid out as."""
    batch = core.batch(rows, CONFIG)
    packing = batch.packing
    way = (
        Way.CHECKPOINT
        if core.packer.checkpoints
        else Way.AGAIN
        if core.packer.recompute.on
        else Way.PLAIN
    )
    sampled = float(packing.tokens)
    if sum(sum(row.mask) for row in rows) > WHOLE:
        samples = (core.watch(batch, len(rows), step).packing.tokens for step in range(SAMPLES))
        sampled = statistics.fmean(samples)
    return {
        "rows": len(rows),
        "parts": len(packing.parts),
        "tokens": packing.tokens,
        "alive": packing.alive,
        "way": [*Way].index(way),
        "forwards": 1 + sampled / packing.tokens,
        "seconds": core.packer.costs.of(packing.parts, way.value),
    }


def long_runs(context: int) -> list[Row]:
    """Eight runs of so many tokens, of which they share a quarter."""
    rng = random.Random(context)
    shared = [rng.randrange(4096) for _ in range(context // 4)]
    own = context - len(shared)
    mask = [0] * len(shared) + [1] * own
    zeros = [0.0] * context
    tails = ([rng.randrange(4096) for _ in range(own)] for _ in range(8))
    return [Row(shared + tail, mask, zeros, zeros) for tail in tails]


def run() -> tuple[dict[str, float], dict[str, object]]:
    core, (ratio, saved) = make_core(), kept_ratios()
    found: dict[str, dict[str, float]] = {}
    ratios: dict[int, float] = {}
    with ExitStack() as stack:
        on_the_card(core, ratio, stack)
        for make in (*WORKLOADS, default_step, large_step):
            workload = make()
            found[workload.name] = planned(core, workload.rows())
        for context in CONTEXTS:
            rows = long_runs(context)
            forest = planned(core, rows)["seconds"]
            with packed(core):
                ratios[context] = forest / planned(core, rows)["seconds"]
    table = Table("workload", *found["large_step"], title="Qwen3-8B on an H200")
    for name, seen in found.items():
        table.add_row(name, *(f"{value:,.4g}" for value in seen.values()))
    console.print(table)
    figures = {
        "parts": found["large_step"]["parts"],
        "forwards": max(found[name]["forwards"] for name in ("default_step", "large_step")),
        "forest_over_rows": max(ratios.values()),
        "saved_bytes_ratio": saved,
    }
    return figures, {"workloads": found, "forest_over_rows": ratios}
