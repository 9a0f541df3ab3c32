"""Evaluate versions on an example's held-out scenarios: ``python -m examples.evaluate NAME``.

``python -m examples.evaluate codenames spymaster@30 guesser@0`` is a trained spymaster with the
base as its guesser: what one role has learned is what it does beside a partner that has learned
nothing.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import typer

from examples.support.command import evaluate_command
from langchain_art import ConfigError
from langchain_art.cli.new import require_imports

NAMES = sorted(path.parent.name for path in Path(__file__).parent.glob("*/train.py"))


def main() -> None:
    """Evaluate the example that the first argument names; the others are its options."""
    name = sys.argv[1].replace("-", "_") if sys.argv[1:] else "none"
    if name not in NAMES:
        known = ", ".join(NAMES).replace("_", "-")
        sys.exit(f"python -m examples.evaluate NAME [MODELS]...: got {name}, expected of {known}")
    try:
        require_imports(name)
    except ConfigError as error:
        sys.exit(str(error))
    del sys.argv[1]
    typer.run(evaluate_command(importlib.import_module(f"examples.{name}.train").DEMO))


if __name__ == "__main__":
    main()
