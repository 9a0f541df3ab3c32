"""CPU time of one learning step, ours against others, on the same tokens with the same gradient.

Four kinds of agents (`benchmarks.learning.workloads`), one small Qwen3 with a LoRA adapter, one
torch thread, from the rows in memory to the gradient of every parameter:

- ours: each distinct token once, in a forest;
- padded rows: a row per conversation, sorted by length, padded; transformers' SDPA;
- packed rows: the same rows end to end without padding, each through the fused causal kernel;
- a row per call: every call with its whole prompt, packed likewise;
- TRL: `GRPOTrainer`, told the tokens by its `rollout_func`, without gradient checkpointing;
- ART: openpipe-art's tokenise, pack, mask, logprobs and loss (`child_art`), as its LocalBackend
  calls them, and with the packing that it has but LocalBackend leaves off.

Gradients are compared before anything is timed (ART's loss weighs tokens in its own way: our
learner is given its weights). Rounds take all methods in turn; a method that has had its share of
time is left out of the later ones. A ratio is the median of its rounds.

On SmolLM2-135M ours and TRL take one step each on sixteen runs of three calls that share a prompt
of 1,500 tokens. A hybrid model, of whose layers three in four are gated delta nets, takes a step
with a shared prompt in a forest and in padded rows. (``python -m benchmarks.learner``: these two.)
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.learning.children import Child, art_python, describe, rows_of_packed, trl_python
from benchmarks.learning.memory import measure_all
from benchmarks.learning.methods import (
    Method,
    distance,
    hybrid_model,
    make_core,
    methods,
    real_model,
)
from benchmarks.learning.plots import plot
from benchmarks.learning.workloads import WORKLOADS, Workload, real_runs, shared_prompt
from langchain_art_server.algorithms.sequences.prefix_forest import grow
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft.learner_core import LearnerCore

ROUNDS = 3
#: CPU seconds after which a method is not measured again on a workload.
SHARE = 30.0
#: Relative distance of two float32 gradients that rounding explains.
EQUAL = 1e-5
#: The same on 30 layers of a pretrained model.
REAL_EQUAL = 1e-4
console = Console()


@dataclass
class Timed:
    """A method on a workload: its next measurement, and what was seen."""

    measure: Callable[[], float]
    tokens: int
    seconds: list[float] = field(default_factory=list[float])

    @property
    def done(self) -> bool:
        return len(self.seconds) == ROUNDS or sum(self.seconds) > SHARE


def ours_and_rows(
    core: LearnerCore, workload: Workload, compared: Sequence[Method]
) -> dict[str, Timed]:
    """Methods of this process, ours first, their gradients compared."""

    def measure(method: Method) -> float:
        rows = method.rows(workload)
        with method.around(core):
            begun = time.process_time()
            method.gradient(core, rows)
            return time.process_time() - begun

    found: dict[str, Timed] = {}
    reference = None
    for method in compared:
        with method.around(core):
            gradient = method.gradient(core, method.rows(workload))
        reference = reference or gradient
        gap = distance(reference, gradient)
        assert gap < EQUAL, (workload.name, method.name, gap)
        found[method.name] = Timed(partial(measure, method), method.tokens)
    return found


def trl_tokens(rows: Sequence[Row]) -> int:
    """Tokens that go through TRL's model: prompts and replies, each padded to the longest."""
    prompts = [row.mask.index(1) for row in rows]
    replies = [len(row.mask) - prompt for row, prompt in zip(rows, prompts, strict=True)]
    return (max(prompts) + max(replies)) * len(rows)


def others(core: LearnerCore, workload: Workload, stack: ExitStack) -> dict[str, Timed]:
    """The other libraries, each in its process, their gradients compared with ours."""
    ours = methods()[0]
    found: dict[str, Timed] = {}

    def start(*args: Any) -> Child:
        told = describe(core, workload)
        child = Child(args[0], args[1], Path(core.name), told, *args[2:])
        stack.callback(child.close)
        return child

    rows = workload.rows()
    if len(rows) == len(workload.runs):  # TRL has one row for each run
        child = start("trl", trl_python(), "1")
        child.step()
        gap = distance(ours.gradient(core, rows), child.gradient())
        assert gap < EQUAL, (workload.name, "TRL", gap)
        found["TRL"] = Timed(lambda c=child: c.step()["seconds"], trl_tokens(rows))
    for mode, name in (("local", "ART"), ("packed", "ART, packing on")):
        child = start("art", art_python(), mode)
        seen = child.step()
        given = rows_of_packed(child.file("packed.safetensors"))
        gap = distance(ours.gradient(core, given), child.gradient())
        assert gap < EQUAL, (workload.name, name, gap)
        found[name] = Timed(lambda c=child: c.step()["seconds"], int(seen["tokens"]))
    return found


def compare(core: LearnerCore, workload: Workload) -> dict[str, dict[str, float]]:
    """For each method tokens, seconds and ratios to ours."""
    with ExitStack() as stack:
        timed = ours_and_rows(core, workload, methods()) | others(core, workload, stack)
        for _ in range(ROUNDS):
            for name, one in timed.items():
                if name == "forest" or not one.done:
                    one.seconds.append(one.measure())
    ours = timed["forest"]
    distinct = len(grow([row.token_ids[:-1] for row in workload.rows()]).token_ids_N)
    return {
        name: {
            "tokens": one.tokens,
            "token_ratio": one.tokens / distinct,
            "seconds": statistics.median(one.seconds),
            "rounds": len(one.seconds),
            "time_ratio": statistics.median(
                theirs / mine for theirs, mine in zip(one.seconds, ours.seconds, strict=False)
            ),
        }
        for name, one in timed.items()
    }


def show(name: str, found: dict[str, dict[str, float]]) -> None:
    columns = ("method", "tokens", "÷ distinct", "CPU s", "÷ ours", "rounds")
    table = Table(*columns, title=name)
    for method, seen in found.items():
        table.add_row(
            method,
            f"{seen['tokens']:,}",
            f"{seen['token_ratio']:.2f}",
            f"{seen['seconds']:.2f}",
            f"{seen['time_ratio']:.2f}",
            str(seen["rounds"]),
        )
    console.print(table)


def real_step() -> dict[str, dict[str, float]]:
    """Ours and TRL's step on the pretrained model: tokens and CPU seconds."""
    core, workload, ours = make_core(real_model), real_runs(), methods()[0]
    begun = time.process_time()
    rows = ours.rows(workload)
    gradient = ours.gradient(core, rows)
    mine = time.process_time() - begun
    child = Child("trl", trl_python(), Path(core.name), describe(core, workload), "1")
    try:
        theirs = child.step()["seconds"]
        gap = distance(gradient, child.gradient())
    finally:
        child.close()
    assert gap < REAL_EQUAL, gap
    found = {
        "forest": {"tokens": ours.tokens, "seconds": mine, "time_ratio": 1.0},
        "TRL": {"tokens": trl_tokens(rows), "seconds": theirs, "time_ratio": theirs / mine},
    }
    console.print({"gradient_distance": gap, **found})
    return found


def hybrid_step() -> dict[str, float]:
    """The forest on gated delta nets and a shared prompt: its tokens, and padded rows' time."""
    core = make_core(hybrid_model)
    assert core.packer.padded_because is None
    workload = shared_prompt()
    timed = ours_and_rows(core, workload, methods()[:2])
    ours, rows = timed["forest"], timed["padded rows"]
    distinct = len(grow([row.token_ids[:-1] for row in workload.rows()]).token_ids_N)
    found = {
        "token_ratio": ours.tokens / distinct,
        "time_ratio": statistics.median(rows.measure() / ours.measure() for _ in range(ROUNDS)),
    }
    console.print({"hybrid": found})
    return found


def run() -> tuple[dict[str, float], dict[str, object]]:
    torch.set_num_threads(1)
    core = make_core()
    found: dict[str, dict[str, dict[str, float]]] = {}
    loads: dict[str, float] = {}
    for make in WORKLOADS:
        workload = make()
        found[workload.name] = compare(core, workload)
        loads[workload.name] = round(os.getloadavg()[0], 2)
        show(workload.name, found[workload.name])
    real, hybrid = real_step(), hybrid_step()
    with tempfile.TemporaryDirectory(prefix="art-bench-") as folder:
        memory = measure_all(Path(folder))
    picture = plot(found)
    short = found["short_tool_agent"]
    figures = {
        "token_ratio": max(seen["forest"]["token_ratio"] for seen in found.values()),
        "step_percall": short["a row per call"]["time_ratio"],
        "step_art": short["ART"]["time_ratio"],
        "step_art_packed": short["ART, packing on"]["time_ratio"],
        "step_trl": real["TRL"]["time_ratio"],
        "step_hybrid": hybrid["time_ratio"],
        "step_trl_small": short["TRL"]["time_ratio"],
        "step_rows_shared": found["shared_prompt"]["packed rows"]["time_ratio"],
        "step_worst_over_rows": max(
            1 / seen["packed rows"]["time_ratio"] for seen in found.values()
        ),
        "memory_dense_over_ours": memory["dense"]["bytes"] / memory["forest"]["bytes"],
        "memory_dense_over_one_part": memory["dense"]["bytes"] / memory["one part"]["bytes"],
    }
    more: dict[str, object] = {
        "model": "Qwen3 h128 l4, LoRA r16",
        "threads": 1,
        "load_after": loads,
        "real": real,
        "hybrid": hybrid,
        "workloads": found,
        "memory": memory,
        "plot": str(picture),
    }
    return figures, more


if __name__ == "__main__":
    torch.set_num_threads(1)
    real_step()
    hybrid_step()
