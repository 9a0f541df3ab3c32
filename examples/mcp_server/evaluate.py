"""Evaluate a version on held-out tasks: ``python -m examples.mcp_server.evaluate``."""

from __future__ import annotations

import typer

from examples.mcp_server.train import DEMO
from examples.support.command import evaluate_command

main = evaluate_command(
    DEMO, "Share of right answers about stations that training has no task about."
)

if __name__ == "__main__":
    typer.run(main)
