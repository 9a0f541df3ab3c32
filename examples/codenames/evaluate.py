"""Evaluate a pair of versions on held-out boards: ``python -m examples.codenames.evaluate``.

``spymaster@30 guesser@0`` is a trained spymaster with the base as its guesser: what one role has
learned is what it does beside a partner that has learned nothing.
"""

from __future__ import annotations

import typer

from examples.codenames.train import DEMO
from examples.support.command import evaluate_command

main = evaluate_command(DEMO, "Mean reward on boards with pairs of kinds that training never saw.")

if __name__ == "__main__":
    typer.run(main)
