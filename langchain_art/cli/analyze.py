"""`langchain-art analyze`: figures of the server's runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from langchain_art.cli.options import AsJson, BaseUrl, client_of, console
from langchain_art.errors import ConfigError


def analyze(
    limit: Annotated[int, typer.Option(min=1, help="Most runs, newest first.")] = 1000,
    scenario: Annotated[str | None, typer.Option(help="Only runs of this scenario.")] = None,
    held_out: Annotated[bool, typer.Option(help="Only runs of evaluations.")] = False,
    success: Annotated[float, typer.Option(help="A run with this reward is a success.")] = 0.5,
    compare: Annotated[
        list[str] | None, typer.Option(metavar="VERSION", help="Twice: before, and after.")
    ] = None,
    gpu_rate: Annotated[
        float | None, typer.Option(min=0.0, help="US dollars an hour of the server.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw into this PNG or SVG.")] = None,
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Success, reward, actions, errors, tokens, cost and latency, by version and node.

    \b
    Examples:
      langchain-art analyze --held-out --success 1.0
      langchain-art analyze --compare email-agent@0 --compare email-agent@17 --plot out/runs.png
      langchain-art analyze --gpu-rate 2.5 --json | jq '.errors[0]'
    """
    if compare and len(compare) != 2:
        raise ConfigError(
            f"got --compare {len(compare)} times, expected it twice: --compare BEFORE --compare "
            "AFTER"
        )
    from langchain_art.analytics import analysis, report
    from langchain_art.wire.trajectories import EVALUATION

    with client_of(base_url) as client:
        runs = client.trajectories(limit, scenario)
    newest = f"These are the newest {limit} runs; older ones are left out (--limit)."
    notes = [newest] if len(runs) == limit else []
    chosen = [run for run in runs if EVALUATION in run.metadata] if held_out else runs
    found = analysis.analyze(chosen, success=success, gpu_rate=gpu_rate)
    found = found.model_copy(update={"notes": (*found.notes, *notes)})
    compared = [analysis.compare(chosen, *compare)] if compare else []
    if as_json:
        told = found.model_dump(mode="json")
        told["comparisons"] = [one.model_dump(mode="json") for one in compared]
        typer.echo(json.dumps(told, indent=2, allow_nan=False))
    else:
        console.print(report.analysis_view(found, compared))
    if plot is not None:
        report.analysis_plot(found, plot)
