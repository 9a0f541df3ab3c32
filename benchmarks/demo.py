"""``make demo`` on ten seeds, each a process with a server of its own, one after the other.

- `least_after`, `mean_after`: held-out reward after training, the least and the mean of ten seeds.
- `seconds`: median of the ten, the server's start and four evaluations included.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

SEEDS = 10
console = Console()


def summary(seed: int) -> dict[str, Any]:
    """Contents of a demo's ``summary.json``."""
    with tempfile.TemporaryDirectory(prefix="art-bench-") as folder:
        argv = [sys.executable, "-m", "langchain_art.cli.main", "demo", "--seed", str(seed)]
        subprocess.run([*argv, "--out", folder], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(Path(folder, "summary.json").read_text())
    before, after = (
        f"{found[at]['mean']:.3f} ± {found[at]['ci95']:.3f}" for at in ("before", "after")
    )
    console.print(f"seed {seed}: {before} → {after} in {found['seconds']:.0f} s")
    return found


def run() -> tuple[dict[str, float], dict[str, Any]]:
    """Figures, and each demo's summary."""
    found = [summary(seed) for seed in range(SEEDS)]
    after = [one["after"]["mean"] for one in found]
    return {
        "least_after": min(after),
        "mean_after": statistics.fmean(after),
        "seconds": statistics.median(one["seconds"] for one in found),
    }, {"demos": found}
