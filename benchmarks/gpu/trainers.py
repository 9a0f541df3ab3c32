"""One step of ours, TRL's and Unsloth's trainer: ``python -m benchmarks.gpu.trainers [--small]``.

The same model, adapter, tokens and policy gradient (no clipping binds, no KL); from rows in memory
to the gradient of every parameter of the adapter, gradients compared before anything is compared
in time. TRL and Unsloth run in environments of their own, made at the first run; one that cannot be
made, or fails, is left out with its reason. Ours is measured first and leaves the device.

Writes ``out/bench/gpu/trainers-NAME.json``: figures, date, hardware, versions, command.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu.learner import OUT, conditions, keep, now, peak_bytes, perturb, settle
from benchmarks.gpu.sampler import save
from benchmarks.gpu.shapes import SHAPES
from benchmarks.learning.children import Child, describe, trl_python
from benchmarks.learning.methods import LORA, Gradient, Method, as_it_is, distance
from benchmarks.learning.workloads import Workload, few_tokens, short_tool_agent
from langchain_art_server.backends.peft import adapter_io
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.environments import environment, unsloth_python

#: Unsloth with its own list of what it needs, for a GPU; on a CPU the tests' environment.
UNSLOTH = ["unsloth==2026.10.9", "unsloth_zoo==2026.10.9", "trl==1.15.0", "torch==2.13.0"]
console = Console()


def peers(device: torch.device) -> dict[str, tuple[str, Callable[[], Path]]]:
    """The other trainers: their script and their Python."""
    if device.type == "cpu":
        return {"TRL": ("trl", trl_python), "Unsloth": ("unsloth", unsloth_python)}
    return {
        "TRL": ("trl", lambda: _python_with("trl", trl_python)),
        "Unsloth": (
            "unsloth",
            lambda: _python_with("unsloth", lambda: environment("unsloth-gpu", UNSLOTH)),
        ),
    }


def _python_with(package: str, make: Callable[[], Path]) -> Path:
    """This Python if it has the package, which `requirements/gpu.txt` brings; else another."""
    return Path(sys.executable) if importlib.util.find_spec(package) is not None else make()


def our_step(
    folder: Path, device: torch.device, dtype: str, workload: Workload, rounds: int
) -> tuple[dict[str, Any], Gradient, dict[str, Any]]:
    """Figures of our learner, its gradient, and the runs as the others read them."""
    core = LearnerCore(str(folder), str(device), dtype)
    core.init_adapter(folder, LORA)
    perturb(core)
    adapter_io.write_adapter(folder, core._config, core.parameters)
    told = describe(core, workload)
    method, rows = Method("ours", Workload.rows, as_it_is), workload.rows()
    settle(device)
    gradient = {name: one.float().cpu() for name, one in method.gradient(core, rows).items()}
    found: dict[str, Any] = {"peak_bytes": peak_bytes(device), "tokens": method.tokens}
    seconds: list[float] = []
    for _ in range(rounds):
        begun = now(device)
        method.gradient(core, rows)
        seconds.append(now(device) - begun)
    return found | {"seconds": statistics.median(seconds)}, gradient, told


def their_step(
    peer: tuple[str, Callable[[], Path]],
    folder: Path,
    told: dict[str, Any],
    batch: int,
    device: torch.device,
    rounds: int,
) -> tuple[dict[str, Any], Gradient]:
    """Figures of another trainer, and its gradient. The first step is not timed: it compiles."""
    script, python = peer
    child = Child(script, python(), folder, told, str(batch), str(device))
    try:
        first = child.step()
        steps = [child.step()["seconds"] for _ in range(rounds)]
        found = {"seconds": statistics.median(steps), "peak_bytes": first["peak_bytes"]}
        return found, child.gradient()
    finally:
        child.close()


def run(
    name: str, device: torch.device, workload: Workload, rounds: int, batch: int, path: Path
) -> dict[str, Any]:
    """All figures of one shape, each trainer's kept at once."""
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory(prefix="art-bench-") as temporary:
        folder = Path(temporary)
        save(SHAPES[name](), folder, device, getattr(torch, dtype))
        ours, gradient, told = our_step(folder, device, dtype, workload, rounds)
        gc.collect()
        settle(device)
        found: dict[str, Any] = {"ours": ours}
        about = conditions("trainers", name, device) | {
            "workload": workload.name,
            "run_tokens": sum(len(row["token_ids"]) for row in told["rows"]),
            "rows_at_once_of_others": batch,
            "trainers": found,
        }
        keep(path, about)
        for other, peer in peers(device).items():
            try:
                figures, theirs = their_step(peer, folder, told, batch, device, rounds)
                figures |= {
                    "gradient_distance": distance(gradient, theirs),
                    "over_ours": figures["seconds"] / ours["seconds"],
                }
            except (RuntimeError, AssertionError, OSError, subprocess.SubprocessError) as error:
                figures = {"left_out": str(error).strip()[-1500:] or repr(error)}
                console.print(f"{other} is left out: {figures['left_out']}", markup=False)
            found[other] = figures
            keep(path, about)
    return found


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    asked.add_argument("--model", choices=[n for n in SHAPES if n != "small"], default="qwen2.5-7b")
    asked.add_argument("--small", action="store_true", help="a model for a CPU, one round")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--batch", type=int, default=4, help="rows at once of the others")
    asked.add_argument("--out", type=Path, default=OUT)
    given = asked.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = "small" if given.small else given.model
    if device.type == "cpu" and not given.small:
        asked.error(f"{name} needs a GPU; --small proves the script on a CPU")
    workload = few_tokens() if given.small else short_tool_agent()
    rounds, batch = (1, 1) if given.small else (given.rounds, given.batch)
    path = given.out / f"trainers-{name}.json"
    console.print_json(data=run(name, device, workload, rounds, batch, path))
    console.print(path)


if __name__ == "__main__":
    main()
