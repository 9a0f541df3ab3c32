"""Evaluate a version on held-out questions: ``python -m examples.text_to_sql.evaluate``."""

from __future__ import annotations

import typer

from examples.support.command import evaluate_command
from examples.text_to_sql.train import DEMO

main = evaluate_command(
    DEMO, "Share of right answers on combinations that training does not ask for."
)

if __name__ == "__main__":
    typer.run(main)
