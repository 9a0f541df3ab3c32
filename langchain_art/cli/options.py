"""What several commands of the command line share: where the server is, and how they print."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

console = Console()

BaseUrl = Annotated[
    str | None,
    typer.Option(envvar="ART_BASE_URL", help="Server, with /v1.", show_default="localhost:8000"),
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines: JSON on standard output.")]


def machine(value: Any) -> None:
    """Print JSON on standard output."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))
