"""`langchain-art canary`: runs `diagnostics.canary.run_canary` and prints its report."""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from langchain_art.cli.options import AsJson, BaseUrl, console, show
from langchain_art.errors import ConfigError


def canary(
    model: Annotated[
        str | None, typer.Option(help="Start a server for this hub name or path, instead.")
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Most training steps of the toy run.")] = 24,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the toy run. Default: by the model's size.")
    ] = None,
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Train a toy task for a minute and check everything that a fit relies on.

    The toy task rewards short replies. Run it on a new machine, or after a change of versions.
    Exit code 1 if a check fails.

    \b
    Examples:
      langchain-art canary --base-url http://gpu-box:8000/v1
      langchain-art canary --model Qwen/Qwen2.5-0.5B-Instruct
    """
    from langchain_art.cli.tables import canary_table
    from langchain_art.client.local_server import LocalServer
    from langchain_art.diagnostics.canary import run_canary
    from langchain_art.training.progress import Display

    if model and base_url and base_url != os.environ.get("ART_BASE_URL"):
        raise ConfigError("got --model and --base-url: start a server, or try one that runs")
    stderr = Console(stderr=True)
    with ExitStack() as stack:
        if model:
            folder = stack.enter_context(TemporaryDirectory(prefix="langchain-art-canary-"))
            local = LocalServer(model, data_dir=Path(folder, "data"))
            with stderr.status(f"{escape(model)} is loaded; output in {local.log}"):
                base_url = stack.enter_context(local).base_url
        advance = stack.enter_context(Display(stderr).bar("canary", steps + 3))
        report = run_canary(
            base_url,
            steps=steps,
            learning_rate=learning_rate,
            on_progress=lambda _done, _total, words: advance(words),
        )
    show(report, as_json, canary_table, passed=report.passed)
    for check in report.checks:
        if not check.passed and not as_json:
            console.print(f"{check.name}: {check.advice}", markup=False, highlight=False)
    if not report.passed:
        raise typer.Exit(1)
