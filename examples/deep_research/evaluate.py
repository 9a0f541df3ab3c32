"""Evaluate a version on held-out questions: ``python -m examples.deep_research.evaluate``."""

from __future__ import annotations

import typer

from examples.deep_research.train import DEMO
from examples.support.command import evaluate_command

main = evaluate_command(
    DEMO, "Share of right facts about towns and topics never asked for in training."
)

if __name__ == "__main__":
    typer.run(main)
