"""The command line that parts of the benchmark share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.learner import OUT
from benchmarks.gpu.shapes import SHAPES


@dataclass(frozen=True)
class Given:
    """What a part was asked for."""

    name: str  # of the shape
    small: bool
    device: torch.device
    path: Path  # of its figures
    options: Any  # of the part alone


def arguments(about: str | None, part: str, **own: dict[str, Any]) -> Given:
    """Read a part's command line; `own` are further options by name, as argparse takes them."""
    asked = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    asked.add_argument("--model", choices=[n for n in SHAPES if n != "small"], default="qwen3-8b")
    asked.add_argument("--small", action="store_true", help="a model for a CPU, few tokens")
    asked.add_argument("--out", type=Path, default=OUT)
    for name, settings in own.items():
        asked.add_argument(f"--{name}", **settings)
    given = asked.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = "small" if given.small else given.model
    if device.type == "cpu" and not given.small:
        asked.error(f"{name} needs a GPU; --small proves the script on a CPU")
    return Given(name, given.small, device, given.out / f"{part}-{name}.json", given)
