"""The demos of the examples: held-out reward before and after on three seeds, and a control.

Each is a process of its own, one after the other: ``langchain-art demo NAME --seed S``, and with
the first seed once more with ``--control``. Results stay in ``out/bench/gallery``, a folder for
each; a demo that has one there is not run again, and one that was stopped begins anew. Beside
``out/bench/gallery.json`` there is the table of the documentation, ``out/bench/gallery.md``.

``python -m benchmarks.gallery tic-tac-toe --seed 1`` runs some of them, and shows the table of all
that are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from examples.support.held_out import Figure, shown
from langchain_art.cli.new import example_names, find_example

OUT = Path("out/bench/gallery")
SEEDS = (0, 1, 2)
#: Seconds for the processes that a demo leaves behind to end.
PATIENCE = 60.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Case:
    """One demo that is run.

    Attributes:
        example: As ``langchain-art demo NAME`` has it.
        seed: Of its scenarios.
        control: With the rewards shuffled within each group.
    """

    example: str
    seed: int
    control: bool = False

    @property
    def folder(self) -> Path:
        return OUT / f"{self.example}-{'control' if self.control else 'seed'}{self.seed}"

    @property
    def arguments(self) -> list[str]:
        """Of ``langchain-art``."""
        control = ["--control"] if self.control else []
        return ["demo", self.example, "--seed", str(self.seed), *control]


def cases(examples: Iterable[str], seeds: Sequence[int], control: bool = True) -> list[Case]:
    """Each example with each seed and, with `control`, the first seed's control."""
    return [
        case
        for name in examples
        for case in [
            *(Case(name, seed) for seed in seeds),
            *([Case(name, seeds[0], control=True)] if control else []),
        ]
    ]


def measure(case: Case) -> dict[str, Any]:
    """Run a demo unless its result is there; its summary, and what it took.

    ``cpu_seconds`` are those of the demo, its server and the server's engines together.

    Raises:
        subprocess.CalledProcessError: the demo failed.
    """
    path = case.folder / "measured.json"
    if not path.exists():
        load = os.getloadavg()[0]
        command = [sys.executable, "-m", "langchain_art.cli.main", *case.arguments]
        print("langchain-art", *case.arguments, flush=True)
        wall, cpu = timed([*command, "--out", case.folder, "--fresh"])
        measured = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "load_at_start": round(load, 2),
            "wall_seconds": round(wall, 1),
            "cpu_seconds": round(cpu, 1),
        }
        path.write_text(json.dumps(measured, indent=2) + "\n")
    summary = json.loads((case.folder / "summary.json").read_text())
    return {"example": case.example} | summary | json.loads(path.read_text())


def timed(command: Sequence[str | Path]) -> tuple[float, float]:
    """Run a command; its wall seconds, and the CPU seconds of all processes that it started.

    A server's engines end after the server and have no parent then: they become children of this
    process (Linux), which waits for them.

    Raises:
        subprocess.CalledProcessError: the command failed.
        TimeoutError: what it left behind does not end.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    begun, spent = time.monotonic(), _cpu_of_children()
    subprocess.run(command, check=True)
    wall = time.monotonic() - begun
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() - begun < wall + PATIENCE:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
        raise TimeoutError(f"processes of {command} still run {PATIENCE:.0f} s after it ended")
    return wall, _cpu_of_children() - spent


def _cpu_of_children() -> float:
    """CPU seconds of the processes that have ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def risen(before: Figure, after: Figure) -> bool:
    """Whether the lower end of the 95 % interval after is above the upper end of that before."""
    return after["mean"] - after["ci95"] > before["mean"] + before["ci95"]


def change(found: dict[str, Any]) -> str:
    """``0.185 ± 0.054 → 0.590 ± 0.068``, and a word if that is not what is wanted of it."""
    unwanted = risen(found["before"], found["after"]) == found["control"]
    word = " (rises)" if found["control"] else " (not clear)"
    figures = f"{shown(found['before'])} → {shown(found['after'])}"
    return figures + (word if unwanted else "")


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each example, with medians of seconds over what was run of it."""
    seeds = sorted({one["seed"] for one in results if not one["control"]})
    heads = [*(f"seed {seed}" for seed in seeds), "control", "seconds", "CPU seconds"]
    lines = [f"| example | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for example in dict.fromkeys(one["example"] for one in results):
        own = [one for one in results if one["example"] == example]
        trained = [one for one in own if not one["control"]]
        by_seed = {one["seed"]: change(one) for one in trained}
        controls = [change(one) for one in own if one["control"]]
        times = [
            f"{statistics.median(one[unit] for one in trained or own):.0f}"
            for unit in ("wall_seconds", "cpu_seconds")
        ]
        cells = [*(by_seed.get(seed, "") for seed in seeds), ", ".join(controls), *times]
        lines.append(f"| `{example}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def figures_of(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How many rose, the longest, and the mean rise of each example over its seeds."""
    trained = [one for one in results if not one["control"]]
    controls = [one for one in results if one["control"]]
    rises: dict[str, list[float]] = {}
    for one in trained:
        rise = one["after"]["mean"] - one["before"]["mean"]
        rises.setdefault(one["example"], []).append(rise)
    return {
        "share_risen": statistics.fmean(risen(one["before"], one["after"]) for one in trained),
        "share_of_controls_risen": statistics.fmean(
            risen(one["before"], one["after"]) for one in controls
        ),
        "wall_seconds_max": max(one["wall_seconds"] for one in trained),
        **{f"rise_{name}": statistics.fmean(values) for name, values in rises.items()},
    }


def run() -> tuple[dict[str, float], dict[str, Any]]:
    results = [measure(case) for case in cases(example_names(), SEEDS)]
    OUT.with_suffix(".md").write_text(table(results))
    return figures_of(results), {"runs": results}


def main(
    examples: Annotated[list[str] | None, typer.Argument(help="Default: all")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="May be given again")] = None,
    control: Annotated[bool, typer.Option(help="Of the first seed, too")] = True,
) -> None:
    """Run the demos of some examples, and show the table of all whose results are there."""
    names = [find_example(name).replace("_", "-") for name in examples or example_names()]
    for case in cases(names, seed or SEEDS, control):
        measure(case)
    everything = cases(example_names(), SEEDS)
    there = [case for case in everything if (case.folder / "measured.json").exists()]
    print(table([measure(case) for case in there]))


if __name__ == "__main__":
    typer.run(main)
