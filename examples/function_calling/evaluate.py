"""How often a version calls rightly: ``python -m examples.function_calling.evaluate``."""

from __future__ import annotations

import typer

from examples.function_calling.train import DEMO
from examples.support.command import evaluate_command

main = evaluate_command(DEMO, "The leaderboard's questions, of the third that training leaves out.")

if __name__ == "__main__":
    typer.run(main)
