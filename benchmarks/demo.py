"""``make demo`` on ten seeds, against the settings that it had until 2026-11-26.

Each demo is a process with a server of its own, one after the other; the first `COMPARED` seeds are
run with the former settings as well, in turns first and second.

- `least_after`, `mean_after`: held-out reward after training, the least and the mean of ten seeds.
- `seconds`: median of the ten, the server's start and four evaluations included.
- `seconds_ratio`: seconds with the former settings over those with the new, median of the seeds
  that ran both.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.email_search import train
from examples.support.demo import Demo, Fit, Setup
from examples.support.demo import run as run_demo

SEEDS, COMPARED = 10, 3
console = Console()


def former_fit(setup: Setup) -> Fit:
    """The demo's parts, with the settings that all examples have."""
    return train.make_fit(setup, setup.config())


def demos() -> dict[str, Demo]:
    """The demo as it is, and as it was."""
    former = replace(train.DEMO, build=former_fit, steps=30, groups_per_step=16, learning_rate=3e-3)
    return {"new": train.DEMO, "former": former}


def summary(name: str, seed: int) -> dict[str, Any]:
    """What a demo's ``summary.json`` holds; it runs in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="art-bench-") as folder:
        argv = [sys.executable, "-m", "benchmarks.demo", name, str(seed), folder]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(Path(folder, "summary.json").read_text())
    before, after = (
        f"{found[at]['mean']:.3f} ± {found[at]['ci95']:.3f}" for at in ("before", "after")
    )
    console.print(f"{name}, seed {seed}: {before} → {after} in {found['seconds']:.0f} s")
    return found


def run() -> tuple[dict[str, float], dict[str, Any]]:
    """Figures, and each demo's summary."""
    found: dict[str, list[dict[str, Any]]] = {"new": [], "former": []}
    for seed in range(SEEDS):
        order = ["former", "new"] if seed % 2 == 0 else ["new", "former"]
        for name in order if seed < COMPARED else ["new"]:
            found[name].append(summary(name, seed))
    after = [one["after"]["mean"] for one in found["new"]]
    seconds = [one["seconds"] for one in found["new"]]
    both = zip(found["former"], found["new"], strict=False)
    return {
        "least_after": min(after),
        "mean_after": statistics.fmean(after),
        "seconds": statistics.median(seconds),
        "seconds_ratio": statistics.median(a["seconds"] / b["seconds"] for a, b in both),
    }, {"demos": found}


if __name__ == "__main__":
    which = demos()[sys.argv[1]]
    run_demo(which, out=Path(sys.argv[3]), steps=which.steps, seed=int(sys.argv[2]))
