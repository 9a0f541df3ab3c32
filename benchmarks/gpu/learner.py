"""One learning step on a GPU: ``python -m benchmarks.gpu.learner [--model NAME] [--small]``.

Random weights of the shape of a real model, LoRA on all linear layers; the step is from rows in
memory to the gradient of every parameter of the adapter. The forest (each distinct token once)
against packed rows (the same tokens end to end, each row to itself), gradients compared first:

- tokens per second, of distinct tokens and of what the runs would be row by row;
- MFU: the operations that the step needs (`shapes.step_flops`) on the tokens that went through the
  model, over the device's peak;
- peak memory;
- the longest context at group 8: runs of that many tokens, a quarter of them shared, in one step.

Writes ``out/bench/gpu/learner-NAME.json``: figures, date, hardware, versions, command.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.gpu.shapes import SHAPES, random_model, step_flops
from benchmarks.learning import memory
from benchmarks.learning.methods import LORA, Method, as_it_is, distance, packed
from benchmarks.learning.workloads import WORKLOADS, Workload
from langchain_art_server.algorithms.sequences.prefix_forest import grow
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft import learner_core
from langchain_art_server.backends.peft.learner_core import LearnerCore

OUT = Path("out/bench/gpu")
GROUP = 8
#: Dense bf16 operations per second, from the makers' data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
#: Relative distance of two float32 gradients that rounding explains. In bfloat16 it is reported.
EQUAL = 1e-5
console = Console()


def make_core(name: str, device: torch.device, dtype: torch.dtype) -> LearnerCore:
    """Our learner on random weights of a shape."""
    return core_of(random_model(SHAPES[name](), dtype, device), name)


def core_of(model: PreTrainedModel, name: str) -> LearnerCore:
    """Our learner on a model, where that is, with an adapter that already does something."""
    with mock.patch.object(learner_core, "load_causal", lambda *_: model):
        core = LearnerCore(name, str(model.device), str(model.dtype).removeprefix("torch."))
    with tempfile.TemporaryDirectory(prefix="art-bench-") as folder:
        core.init_adapter(Path(folder), LORA)
    perturb(core)
    return core


def perturb(core: LearnerCore) -> None:
    """Make the adapter do something: a new one's B is zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in sorted(core.parameters):
            if "lora_B" in one:
                parameter = core.parameters[one]
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    core.rounded()


def methods() -> list[Method]:
    return [Method("forest", Workload.rows, as_it_is), Method("packed rows", Workload.rows, packed)]


def settle(device: torch.device) -> None:
    """Wait for the device, and forget what earlier steps held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        memory.reset()


def now(device: torch.device) -> float:
    """Seconds of a clock: the wall's, once the device is done; of this process on a shared CPU."""
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_bytes(device: torch.device) -> int:
    """Most memory since `settle`: allocated on a GPU, of the whole process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory.peak()


def take(core: LearnerCore, method: Method, rows: Sequence[Row]) -> tuple[float, dict[str, Any]]:
    """Seconds of one step, and its gradient."""
    with method.around(core):
        begun = now(core.device)
        gradient = method.gradient(core, rows)
        return now(core.device) - begun, gradient


def needed(core: LearnerCore, method: Method, rows: Sequence[Row]) -> float:
    """Operations of a step over what the method puts through the model."""
    inputs = [row.token_ids[:-1] for row in rows]
    trie = grow(inputs)
    shared = method.name == "forest"
    # A row that ends in context is cut there by both; these rows end in what was sampled.
    attended = (
        int((trie.depth_N + 1).sum())
        if shared
        else sum(len(one) * (len(one) + 1) // 2 for one in inputs)
    )
    tokens = len(trie.token_ids_N) if shared else sum(map(len, inputs))
    places = [
        place[np.flatnonzero(row.mask) - 1] for place, row in zip(trie.rows, rows, strict=True)
    ]
    predicted = len(np.unique(np.concatenate(places))) if shared else sum(map(len, places))
    config = core.base.config.get_text_config()
    return step_flops(config, tokens, attended, predicted, LORA.rank)


def measure(core: LearnerCore, workload: Workload, rounds: int, peak: float) -> dict[str, Any]:
    """Both methods on one workload, in turn."""
    rows = workload.rows()
    distinct = len(grow([row.token_ids[:-1] for row in rows]).token_ids_N)
    total = sum(len(row.token_ids) - 1 for row in rows)
    ways, found = methods(), dict[str, Any]()
    reference = None
    for method in ways:
        settle(core.device)
        _, gradient = take(core, method, rows)
        reference = reference or gradient
        found[method.name] = {
            "tokens": method.tokens,
            "alive": core.packer.alive,
            "peak_bytes": peak_bytes(core.device),
            "checkpointed": core.packer.checkpoints,
            "gradient_distance": distance(reference, gradient),
        }
        if core.dtype == torch.float32:
            assert found[method.name]["gradient_distance"] < EQUAL, (workload.name, found)
    del reference, gradient
    seconds: dict[str, list[float]] = {method.name: [] for method in ways}
    for _ in range(rounds):
        for method in ways:
            seconds[method.name].append(take(core, method, rows)[0])
    for method in ways:
        spent = statistics.median(seconds[method.name])
        found[method.name] |= {
            "seconds": spent,
            "distinct_tokens_per_second": distinct / spent,
            "run_tokens_per_second": total / spent,
            "mfu": needed(core, method, rows) / spent / peak,
        }
    ratios = [b / a for a, b in zip(seconds["forest"], seconds["packed rows"], strict=True)]
    return {
        "distinct_tokens": distinct,
        "run_tokens": total,
        "rows_over_forest": statistics.median(ratios),
        "methods": found,
    }


def group_of(context: int, vocab: int) -> list[Row]:
    """Eight runs of `context` tokens: a quarter shared, then tool calls of 28 tokens, 96 heard."""
    rng = random.Random(context)
    shared = [rng.randrange(vocab) for _ in range(context // 4)]
    own = context - len(shared)
    mask = [0] * len(shared) + [int(i % 124 < 28) for i in range(own - 1)] + [1]
    return [
        Row(
            token_ids=shared + [rng.randrange(vocab) for _ in range(own)],
            mask=mask,
            logprobs=[-1.0] * context,
            advantages=[float(1 - 2 * (run % 2))] * context,
        )
        for run in range(GROUP)
    ]


def longest(
    core: LearnerCore, method: Method, most: int, note: Callable[[dict[str, Any]], None]
) -> None:
    """The longest context whose group of 8 goes through: doubled from 1,024, then by eighths.

    Noted after each try.
    """
    vocab, good, bad = core.base.config.get_text_config().vocab_size, 0, most + 1
    tried: list[dict[str, Any]] = []
    context = min(1024, most)
    while True:
        settle(core.device)
        try:
            seconds, _ = take(core, method, group_of(context, vocab))
            good = context
            tried.append(
                {
                    "context": context,
                    "seconds": seconds,
                    "tokens": method.tokens,
                    "peak_bytes": peak_bytes(core.device),
                    "checkpointed": core.packer.checkpoints,
                }
            )
        except torch.OutOfMemoryError:
            bad = context
            tried.append({"context": context, "out_of_memory": True})
        for parameter in core.parameters.values():
            parameter.grad = None
        context = min(2 * good, most) if bad > most else good + (bad - good) // 2
        done = context <= good or (bad <= most and bad - good <= max(1024, good // 8))
        limit = ("memory" if bad <= most else "--most") if done else "the end of this part"
        note({"longest": good, "limited_by": limit, "tried": tried})
        if done:
            break


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large product of matrices: where no data sheet is known."""
    size = 8192 if device.type == "cuda" else 1024
    one = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        begun = now(device)
        one @ one
        best = min(best, now(device) - begun)
    return 2 * size**3 / best


def hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "transformers", "peft")},
        "device": str(device),
        "clock": "wall" if device.type == "cuda" else "CPU time of the process",
        "torch_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found |= {"name": about.name, "memory": about.total_memory, "cuda": torch.version.cuda}
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return found


def conditions(script: str, name: str, device: torch.device) -> dict[str, Any]:
    """What each script writes beside its figures."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([f"python -m benchmarks.gpu.{script}", *sys.argv[1:]]),
        "model": name,
        "dtype": "float32" if device.type == "cpu" else "bfloat16",
        "lora_rank": LORA.rank,
        "hardware": hardware(device),
    }


def keep(path: Path, found: Mapping[str, Any]) -> None:
    """Write figures so that the file is whole at any moment: a part may be killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(found, indent=2) + "\n")
    scratch.replace(path)


def peak_of(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Operations per second that the device can do at most, and where that is from."""
    about = hardware(device)
    for key, peak in PEAKS.items():
        if key in about.get("name", ""):
            return peak, "data sheet"
    return matmul_peak(device, dtype), "largest of five products of matrices here"


def run(
    name: str, device: torch.device, wanted: Sequence[str], rounds: int, most: int, path: Path
) -> None:
    """All figures of one shape, each kept at once."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    peak, source = peak_of(device, dtype)
    core = make_core(name, device, dtype)
    if core.packer.padded_because is not None:
        console.print(
            f"[bold red]No forest: {core.packer.padded_because}. Both ways are padded rows.[/]"
        )
    workloads, contexts = dict[str, Any](), dict[str, Any]()
    found = conditions("learner", name, device) | {
        "parameters": core.info["parameters"],
        "padded_because": core.packer.padded_because,
        "peak_flops": peak,
        "peak_from": source,
        "rounds": rounds,
        "workloads": workloads,
        "longest_context_group_8": contexts,
    }
    for workload in (make() for make in WORKLOADS if make.__name__ in wanted):
        workloads[workload.name] = measure(core, workload, rounds, peak)
        keep(path, found)
        show(workload.name, workloads[workload.name])
    for method in methods():

        def note(seen: dict[str, Any], way: str = method.name) -> None:
            contexts[way] = seen
            keep(path, found)

        longest(core, method, most, note)
        seen = contexts[method.name]
        limit = f"limited by {seen['limited_by']}"
        console.print(
            f"longest context at group {GROUP}, {method.name}: {seen['longest']:,} ({limit})"
        )


def show(name: str, found: dict[str, Any]) -> None:
    columns = ("method", "tokens", "s", "distinct tok/s", "run tok/s", "MFU", "peak GB", "again")
    table = Table(*columns, title=f"{name}: rows ÷ forest {found['rows_over_forest']:.2f}")
    for method, seen in found["methods"].items():
        table.add_row(
            method,
            f"{seen['tokens']:,}",
            f"{seen['seconds']:.3f}",
            f"{seen['distinct_tokens_per_second']:,.0f}",
            f"{seen['run_tokens_per_second']:,.0f}",
            f"{seen['mfu']:.1%}",
            f"{seen['peak_bytes'] / 1e9:.2f}",
            "yes" if seen["checkpointed"] else "no",
        )
    console.print(table)


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    asked.add_argument("--model", choices=[n for n in SHAPES if n != "small"], default="qwen2.5-7b")
    asked.add_argument("--small", action="store_true", help="a model for a CPU, few rounds")
    asked.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    every = [make.__name__ for make in WORKLOADS]
    asked.add_argument("--workloads", nargs="+", choices=every, default=every)
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--most", type=int, default=131072, help="longest context that is tried")
    asked.add_argument("--out", type=Path, default=OUT)
    given = asked.parse_args()
    device, name = torch.device(given.device), "small" if given.small else given.model
    if device.type == "cpu" and not given.small:
        asked.error(f"{name} needs a GPU; --small proves the script on a CPU")
    path = given.out / f"learner-{name}.json"
    run(name, device, given.workloads, given.rounds, given.most, path)
    console.print(path)


if __name__ == "__main__":
    main()
