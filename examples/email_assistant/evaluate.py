"""Success rate of a version: ``python -m examples.email_assistant.evaluate``."""

from __future__ import annotations

import typer

from examples.email_assistant.train import DEMO
from examples.support.command import evaluate_command

main = evaluate_command(
    DEMO, "Success rate on questions whose project and event never met in training, by kind."
)

if __name__ == "__main__":
    typer.run(main)
