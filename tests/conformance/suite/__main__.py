"""``python -m tests.conformance.suite``: the suite of graphs against a server."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from langchain_art.errors import ArtError, ConfigError
from tests.conformance.suite.harness import MODES, Mode
from tests.conformance.suite.model import write_model
from tests.conformance.suite.promises import PROMISES, STATES, PromiseCheck, Suite, chosen

#: Reasons that are printed.
_SHOWN = 10


def main(
    server: Annotated[
        str | None, typer.Option(envvar="ART_BASE_URL", help="The server, with /v1.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="The model that is asked. Default: a policy is made, 'conformance'."),
    ] = None,
    only: Annotated[str, typer.Option(help="Words of the names of topologies.")] = "",
    mode: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(MODES)}; may be repeated. Default: all.")
    ] = None,
    gap: Annotated[
        float, typer.Option(help="Nats between learner and sampler; 0.05 in half precision.")
    ] = 1e-4,
    report: Annotated[Path | None, typer.Option(help="Write all findings there, as JSON.")] = None,
    model: Annotated[
        Path | None,
        typer.Option("--write-model", help="Write the model that is to be served, and end."),
    ] = None,
) -> None:
    """Run the conformance suite of graphs against a server that captures calls.

    Each graph is run with ChatART through a proxy on this machine, which sees every call; what was
    captured of the run is compared with that. The server serves a model whose weights are computed
    and which says what the prompts tell it to.

    Exit code 0 if every promise that can be checked is held, 1 if one is not, 2 for a mistake.

    \b
    Example:
      python -m tests.conformance.suite --write-model ./conformance-model
      langchain-art serve ./conformance-model
      python -m tests.conformance.suite --server http://localhost:8000/v1
    """
    console = Console()
    if model is not None:
        folder = write_model(model)
        console.print(f"Written: {escape(str(folder))}. Next: langchain-art serve {folder}")
        return
    if server is None:
        raise ConfigError("got no server, expected --server http://HOST:PORT/v1, or --write-model")
    modes: list[Mode] = [one for one in MODES if one in (mode or MODES)]
    if unknown := set(mode or ()) - set(MODES):
        raise ConfigError(f"got --mode {sorted(unknown)}, expected some of {', '.join(MODES)}")
    cases = chosen(only, modes)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("topologies", total=len(cases))
        findings = Suite(server, policy, gap).run(
            cases, lambda case, _: progress.update(task, advance=1, description=case.name[:40])
        )
    console.print(_table(findings))
    for finding in [one for one in findings if one.state == "not held"][:_SHOWN]:
        where = f"{finding.topology}, {finding.mode}: {finding.promise}"
        console.print(f"[red]{escape(where)}[/]\n  {escape(finding.reason)}")
    for why, count in Counter(one.reason for one in findings if one.state == STATES[-1]).items():
        console.print(f"[yellow]cannot be checked, {count} times:[/] {escape(why[:300])}")
    if report is not None:
        found = {"server": server, "findings": [asdict(one) for one in findings]}
        report.write_text(json.dumps(found) + "\n", encoding="utf-8")
        console.print(f"Report: {escape(str(report))}")
    raise typer.Exit(1 if any(one.state == "not held" for one in findings) else 0)


def _table(findings: Sequence[PromiseCheck]) -> Table:
    table = Table("promise", *STATES, title="Runs of topologies, by promise")
    counts = Counter((one.promise, one.state) for one in findings)
    for promise in PROMISES:
        table.add_row(promise, *(str(counts[promise, state]) for state in STATES))
    return table


if __name__ == "__main__":
    try:
        typer.run(main)
    except ArtError as error:
        Console(stderr=True).print(f"[bold red]{type(error).__name__}:[/]", end=" ")
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
