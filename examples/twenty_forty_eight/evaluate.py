"""Evaluate a version on held-out games: ``python -m examples.twenty_forty_eight.evaluate``."""

from __future__ import annotations

import typer

from examples.support.command import evaluate_command
from examples.twenty_forty_eight.train import DEMO

main = evaluate_command(DEMO, "Highest tile, and how often it is above a random player's.")

if __name__ == "__main__":
    typer.run(main)
