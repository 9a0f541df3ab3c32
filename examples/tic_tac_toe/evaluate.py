"""Evaluate a version against the perfect player: ``python -m examples.tic_tac_toe.evaluate``."""

from __future__ import annotations

import typer

from examples.support.command import evaluate_command
from examples.tic_tac_toe.train import DEMO

main = evaluate_command(DEMO, "Share of games that a perfect player does not win.")

if __name__ == "__main__":
    typer.run(main)
