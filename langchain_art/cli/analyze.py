"""`langchain-art analyze`: what runs, or a fit, came to."""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from langchain_art.cli.fits import Root
from langchain_art.cli.options import AsJson, BaseUrl, client_of, console
from langchain_art.errors import ConfigError

if TYPE_CHECKING:
    from langchain_art.wire import Trajectory


def analyze(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Folders of fits. None: the server's runs."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most runs, newest first.")] = 1000,
    scenario: Annotated[str | None, typer.Option(help="Only runs of this scenario.")] = None,
    held_out: Annotated[bool, typer.Option(help="Only runs of evaluations.")] = False,
    langfuse: Annotated[bool, typer.Option(help="Traces of Langfuse instead.")] = False,
    score: Annotated[str, typer.Option(help="Langfuse's score that is the reward.")] = "reward",
    environment: Annotated[str | None, typer.Option(help="Langfuse's: only of this one.")] = None,
    success: Annotated[float, typer.Option(help="A run with this reward is a success.")] = 0.5,
    compare: Annotated[
        list[str] | None, typer.Option(metavar="VERSION", help="Twice: before, and after.")
    ] = None,
    gpu_rate: Annotated[
        float | None, typer.Option(min=0.0, help="US dollars an hour of the server.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw into this PNG or SVG.")] = None,
    root: Root = Path("out"),
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Success, reward, actions, errors, tokens, cost and latency, by version and node.

    Without a name, of the server's runs; with names, of fits by their own files; with --langfuse,
    of the traces of a project (LANGFUSE_PUBLIC_KEY, LANGFUSE_SECRET_KEY, LANGFUSE_BASE_URL).

    \b
    Examples:
      langchain-art analyze --held-out --success 1.0
      langchain-art analyze --compare email-agent@0 --compare email-agent@17 --plot out/runs.png
      langchain-art analyze my-agent --gpu-rate 2.5
    """
    if compare and len(compare) != 2:
        raise ConfigError(
            f"got --compare {len(compare)} times, expected it twice: --compare BEFORE --compare "
            "AFTER"
        )
    if langfuse and held_out:
        raise ConfigError(
            "got --held-out with --langfuse, whose runs of evaluations are told by their "
            "environment; write --environment NAME instead"
        )
    if not names:
        notes: list[str] = []
        if langfuse:
            from langchain_art.analytics.langfuse_runs import langfuse_runs

            read = langfuse_runs(score=score, environment=environment, limit=limit)
            runs, notes = read.runs, read.notes
        else:
            with client_of(base_url) as client:
                runs = client.trajectories(limit, scenario)
        if len(runs) == limit:
            notes.append(f"These are the newest {limit} runs; older ones are left out (--limit).")
        chosen = [run for run in runs if scenario is None or run.scenario == scenario]
        _runs(chosen, held_out, success, compare, gpu_rate, plot, as_json, notes)
        return
    given = {
        "--scenario": scenario,
        "--held-out": held_out,
        "--plot": plot,
        "--langfuse": langfuse,
    }
    if refused := [name for name, value in given.items() if value]:
        raise ConfigError(
            f"got {' and '.join(refused)} with the name of a fit, whose files have no runs; leave "
            "out the name. `langchain-art curve --png` draws a fit."
        )
    from langchain_art.analytics.history import analyze_fit, compare_evals, fit_view
    from langchain_art.training.fits import chosen_fits

    told: list[dict[str, Any]] = []
    for fit in chosen_fits(root, names):
        found = analyze_fit(fit, gpu_rate)
        compared = [compare_evals(found.evals, *compare)] if compare else []
        if not as_json:
            console.print(fit_view(found, compared))
        shown = {"comparisons": [one.model_dump(mode="json") for one in compared]}
        told.append(found.model_dump(mode="json") | shown)
    if as_json:
        typer.echo(json.dumps(told, indent=2, allow_nan=False))


def _runs(
    runs: list[Trajectory],
    held_out: bool,
    success: float,
    versions: list[str] | None,
    gpu_rate: float | None,
    plot: Path | None,
    as_json: bool,
    notes: list[str],
) -> None:
    from langchain_art.analytics import analysis, report
    from langchain_art.wire.trajectories import EVALUATION

    chosen = [run for run in runs if EVALUATION in run.metadata] if held_out else runs
    found = analysis.analyze(chosen, success=success, gpu_rate=gpu_rate)
    found = found.model_copy(update={"notes": (*found.notes, *notes)})
    compared = [analysis.compare(chosen, *versions)] if versions else []
    if as_json:
        told = found.model_dump(mode="json")
        told["comparisons"] = [one.model_dump(mode="json") for one in compared]
        typer.echo(json.dumps(told, indent=2, allow_nan=False))
    else:
        console.print(report.analysis_view(found, compared))
    if plot is not None:
        report.analysis_plot(found, plot)
