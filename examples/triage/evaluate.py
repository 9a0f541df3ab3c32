"""How often a version routes rightly: ``python -m examples.triage.evaluate``."""

from __future__ import annotations

import typer

from examples.support.command import evaluate_command
from examples.triage.train import DEMO

main = evaluate_command(DEMO, "Share of messages, of problems never met in training, routed right.")

if __name__ == "__main__":
    typer.run(main)
