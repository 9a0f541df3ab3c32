"""`langchain-art key`: the server's API key."""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Make the server's own API key, its administrator's; `langchain-art keys` makes others."
    "\n\n\b\nExample:\n"
    "  export ART_API_KEY=$(langchain-art key new)",
)


@app.command()
def new() -> None:
    """Print a new key, of 32 random bytes.

    \b
    Example:
      export ART_API_KEY=$(langchain-art key new)
    """
    from langchain_art.wire.api_keys import new_api_key

    typer.echo(new_api_key())
