"""Evaluate a version on held-out questions: ``python -m examples.email_search.evaluate``."""

from __future__ import annotations

import typer

from examples.email_search.train import DEMO
from examples.support.command import evaluate_command

main = evaluate_command(
    DEMO, "Mean reward on questions whose project and event never met in training."
)

if __name__ == "__main__":
    typer.run(main)
