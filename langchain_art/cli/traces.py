"""`langchain-art traces`: what a graph did elsewhere or earlier, as something to learn from."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from langchain_art.cli.options import AsJson, BaseUrl, client_of, say
from langchain_art.errors import ConfigError
from langchain_art.export.ids import HUMAN_REWARD

app = typer.Typer(no_args_is_help=True, help="Learn from traces of production.")


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="langfuse, langsmith, or a JSONL file (conversations, exported traces, "
            "OpenEnv's training traces)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder that receives the files.")] = Path(
        "out/traces"
    ),
    since: Annotated[
        datetime | None, typer.Option(help="Only traces that began then (UTC) or later.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option(help="Langfuse: only traces of this environment.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The most traces, the newest ones.")] = 1000,
    project: Annotated[str | None, typer.Option(help="LangSmith: the project's name.")] = None,
    name: Annotated[str, typer.Option(help="The score that people gave.")] = HUMAN_REWARD,
    good: Annotated[float, typer.Option(help="The lowest score of a demonstration.")] = 1.0,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="The most versions that a fresh call is behind.")
    ] = 8,
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Sort traces by what can be learned from them: exact tokens, scenarios, demonstrations.

    Calls that this server's policies answered, by versions that are fresh, are trained on as they
    were sampled. Others become scenarios for new rollouts and, if people scored them well,
    conversations for supervised steps.

    \b
    Examples:
      langchain-art traces import langfuse --since 2026-11-01 --environment production --good 0.8
      langchain-art traces import langsmith --project mail-agent
      langchain-art traces import runs.jsonl --out out/last-week
    """
    from langchain_art.traces.importing import FILES, REASONS, import_traces

    begun = None if since is None else since.replace(tzinfo=UTC)
    options = {"--since": since, "--environment": environment, "--project": project}
    allowed = {"langfuse": {"--since", "--environment"}, "langsmith": {"--since", "--project"}}
    for option in {one for one, value in options.items() if value is not None}:
        if option not in allowed.get(source, ()):
            raise ConfigError(f"got {option} with {source!r}, which has no use for it")
    if source == "langfuse":
        from langchain_art.traces.from_langfuse import read_langfuse

        read = read_langfuse(begun, environment=environment, name=name, limit=limit)
    elif source == "langsmith":
        from langchain_art.traces.from_langsmith import read_langsmith

        if project is None:
            raise ConfigError("got langsmith without --project, expected the project's name")
        read = read_langsmith(project, begun, name=name, limit=limit)
    else:
        from langchain_art.traces.from_jsonl import read_file

        read = read_file(Path(source), name)
    store = source if source in allowed else "file"
    with client_of(base_url) as client:
        found = import_traces(
            client, read, out, store=store, good=good, max_staleness=max_staleness
        )
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    total = found.exact + found.stale + found.foreign + found.unreadable
    say(
        f"{total} traces read: {found.exact} exact, {found.stale} stale, {found.foreign} of other "
        f"models, {found.unreadable} that cannot be read"
    )
    for file, count in found.written.items():
        say(f"{out / file}: {count} {FILES[file]}" if count else f"no {file}")
        for reason, left in found.left_out[file].items():
            say(f"  left out: {left} {REASONS[reason]}")


@app.command()
def export(
    runs: Annotated[list[str], typer.Argument(help="Ids of runs.")],
    out: Annotated[Path, typer.Option(help="The JSONL file that receives a line a run.")],
    base_url: BaseUrl = None,
) -> None:
    """Write runs as training traces of OpenEnv: exact tokens, with the nodes that sampled them.

    \b
    Example:
      langchain-art traces export run-1 run-2 --out out/runs.jsonl
    """
    from langchain_art.traces.training_traces import training_trace

    with client_of(base_url) as client:
        lines = [json.dumps(training_trace(client, run), ensure_ascii=False) for run in runs]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    say(f"{out}: {len(lines)} training traces")
