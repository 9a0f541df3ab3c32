"""Evaluate a version on held-out puzzles: ``python -m examples.temporal_clue.evaluate``."""

from __future__ import annotations

import typer

from examples.support.command import evaluate_command
from examples.temporal_clue.train import DEMO

main = evaluate_command(
    DEMO, "Mean reward on puzzles whose thief was where that suspect never was."
)

if __name__ == "__main__":
    typer.run(main)
