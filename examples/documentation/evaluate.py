"""How far a version comes: ``python -m examples.documentation.evaluate``."""

from __future__ import annotations

import typer

from examples.documentation.train import DEMO
from examples.support.command import evaluate_command

main = evaluate_command(DEMO, "Reward on questions about modules that training never asked about.")

if __name__ == "__main__":
    typer.run(main)
