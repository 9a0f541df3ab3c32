"""`langchain-art doctor` and `canary`: what `diagnostics` finds of this machine, or of a server."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from langchain_art.cli.options import AsJson, BaseUrl, say, show, stderr
from langchain_art.errors import ConfigError

if TYPE_CHECKING:
    from langchain_art.diagnostics.doctor import DoctorReport

_VERDICTS = {True: "[green]ok[/]", False: "[bold red]no[/]", None: ""}


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A local path or a hub name that is in the cache.")
    ] = None,
    context: Annotated[int, typer.Option(min=16, help="Tokens of a call.")] = 8192,
    host: Annotated[str, typer.Option(help="That the server would bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Likewise.")] = 8000,
    data_dir: Annotated[Path, typer.Option(help="Where its data would be.")] = Path("art-data"),
    then_canary: Annotated[
        bool, typer.Option("--canary", help="Then start MODEL and train a toy on it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Examine this machine: what is installed, what is missing, which models fit.

    Memory is computed from the sizes of MODEL (or of some published ones). Exit code 1 if
    something is wrong, or MODEL does not fit.

    \b
    Examples:
      langchain-art doctor
      langchain-art doctor Qwen/Qwen3-4B --context 16384 --canary
    """
    from langchain_art.diagnostics.doctor import examine

    if then_canary and model is None:
        raise ConfigError("got --canary without a MODEL to start; expected its name or path")
    if then_canary and as_json:
        raise ConfigError("got --canary and --json: run `langchain-art canary --json` for its own")
    report = examine(model, host=host, port=port, data_dir=data_dir, context=context)
    show(report, as_json, partial(_view, model=model), healthy=report.healthy)
    if not report.healthy:
        raise typer.Exit(1)
    if then_canary:
        canary(model=model)


def _view(report: DoctorReport, model: str | None) -> Group:
    table = Table("what", "found", "")
    for one in report.findings:
        table.add_row(one.name, escape(one.found), _VERDICTS[one.ok])
    advice = [Text(f"{one.name}: {one.advice}") for one in report.findings if one.advice]
    title = (
        f"What fits into {report.memory_bytes / 1e9:.1f} GB of {report.device}: "
        f"a call of {report.context} tokens, and a row as long to learn from"
    )
    sizes = Table("model", "weights", "sampler", "learner", "fits", title=title)
    for one in report.fits:
        sizes.add_row(
            escape(one.model),
            f"{one.parameters / 1e9:.2f}B {one.quantization or one.dtype}",
            f"{one.sampler_bytes / 1e9:.1f} GB",
            f"{one.learner_bytes / 1e9:.1f} GB",
            one.placement or "no",
        )
    command = f"Next: langchain-art canary --model {model or 'MODEL'}"
    return Group(table, *advice, sizes, Text(command))


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
    with ExitStack() as stack:
        if model:
            folder = stack.enter_context(TemporaryDirectory(prefix="langchain-art-canary-"))
            local = LocalServer(model, data_dir=Path(folder, "data"))
            with stderr.status(f"{escape(model)} is loaded; output in {local.log}"):
                base_url = stack.enter_context(local).base_url
        advance = stack.enter_context(Display(stderr).bar("canary", steps + 3))
        report = run_canary(base_url, steps=steps, learning_rate=learning_rate, on_progress=advance)
    show(report, as_json, canary_table, passed=report.passed)
    for check in report.checks:
        if not check.passed and not as_json:
            say(f"{check.name}: {check.advice}")
    if not report.passed:
        raise typer.Exit(1)
