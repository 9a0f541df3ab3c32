"""Evaluate a version on held-out lakes: ``python -m examples.frozen_lake.evaluate``."""

from __future__ import annotations

import typer

from examples.frozen_lake.train import DEMO
from examples.support.command import evaluate_command

main = evaluate_command(DEMO, "How near to the goal it comes on lakes never met in training.")

if __name__ == "__main__":
    typer.run(main)
