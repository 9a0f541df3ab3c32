"""``python -m benchmarks [NAME]``: run one benchmark, or all, one after the other."""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
OUT = Path("out/bench")
console = Console()


def names() -> list[str]:
    return sorted(p.stem for p in HERE.glob("*.py") if not p.stem.startswith("__"))


def conditions() -> dict[str, object]:
    packages = ("torch", "transformers", "peft", "langgraph", "langchain-core", "openai")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "packages": {name: version(name) for name in packages},
    }


def run(name: str) -> None:
    about = conditions()
    begun = time.monotonic()
    figures, more = importlib.import_module(f"benchmarks.{name}").run()
    seconds = time.monotonic() - begun
    table = Table("figure", "value", title=name)
    for figure, value in figures.items():
        table.add_row(figure, f"{value:.4g}")
    console.print(table)
    OUT.mkdir(parents=True, exist_ok=True)
    result = {"figures": figures, "conditions": about | more, "seconds": round(seconds, 1)}
    path = OUT / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"{path} ({seconds:.0f} s)")


def main() -> None:
    wanted = sys.argv[1:] or names()
    if unknown := [name for name in wanted if name not in names()]:
        console.print(f"No benchmark {unknown}; there are {names()}.")
        sys.exit(2)
    for name in wanted:
        run(name)


if __name__ == "__main__":
    main()
