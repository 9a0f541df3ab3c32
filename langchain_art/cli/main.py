"""The command `langchain-art`. Most commands are clients of a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.text import Text

from langchain_art.cli import checkpoints, keys, review, traces
from langchain_art.cli import fits as fit_commands
from langchain_art.cli.analyze import analyze
from langchain_art.cli.doctor import canary, doctor
from langchain_art.cli.fits import Root, curve
from langchain_art.cli.options import (
    AsJson,
    BaseUrl,
    client_of,
    console,
    find_run,
    redacted,
    say,
    show,
    split_version,
    stderr,
)
from langchain_art.cli.worker import worker
from langchain_art.errors import ArtError, ConfigError, Conflict

app = typer.Typer(
    name="langchain-art",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Reinforcement learning for LangGraph agents: serve a small model, train it on your "
    "agent's own runs, look at what it did."
    "\n\n\b\nA first run:\n"
    "  langchain-art serve Qwen/Qwen2.5-0.5B-Instruct --policy email-agent\n"
    "  langchain-art status"
    "\n\n\b\nEnvironment:\n"
    "  ART_BASE_URL  where the server is (http://localhost:8000/v1)\n"
    "  ART_API_KEY   its key, for servers and clients alike; never a flag",
)
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(fit_commands.app, name="fits")
app.add_typer(keys.server_key, name="key")
app.add_typer(keys.app, name="keys")
app.add_typer(review.app, name="review")
app.add_typer(traces.app, name="traces")
app.command()(analyze)
app.command()(canary)
app.command()(doctor)
app.command()(curve)
app.command()(worker)


def _print_version(wanted: bool) -> None:
    if wanted:
        from langchain_art._version import __version__

        typer.echo(f"langchain-art {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of no command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an `ArtError` becomes one message and exit code 1."""
    try:
        app(args=list(arguments) if arguments is not None else None)
    except ArtError as error:
        stderr.print(f"[bold red]{type(error).__name__}:[/]", end=" ")
        say(str(error), on=stderr)
        sys.exit(1)


#: For commands that become another program, which parses their arguments.
_PASSED_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}


#: Commands of the server's package.
_OF_THE_SERVER = {
    "serve": "Serve a base model and its policies over OpenAI's API; `serve --help` says more.",
    "scrub": "Check all that a server has stored against its digests; `scrub --help` says more.",
    "backup": "Back up a running server into a new data directory; `backup --help` says more.",
}


def become_server(context: typer.Context) -> None:
    """Become a command of the server's package. Raises ConfigError if it is not installed."""
    from langchain_art.client.local_server import require_server

    require_server()
    name = str(context.info_name)
    if name == "serve":
        _become("langchain_art_server", context.args)
    else:
        _become("langchain_art_server.backups", [name, *context.args])


for _name, _words in _OF_THE_SERVER.items():  # --help is passed on too
    _passed_on = _PASSED_ON | {"help_option_names": []}
    app.command(_name, help=_words, context_settings=_passed_on)(become_server)


@app.command(context_settings=_PASSED_ON, options_metavar="[NAME] [OPTIONS]")
def demo(
    context: typer.Context,
    reviewer: Annotated[
        Literal["scripted"] | None,
        typer.Option("--review", help="Learn from one who marks and corrects 40 runs."),
    ] = None,
) -> None:
    """Train one of the example agents on this machine, from server start to reward plot.

    NAME is a folder below examples/, such as tic-tac-toe; without one it is the e-mail agent.
    Stopped and run again, it goes on; --fresh begins anew. Options: see
    `python -m examples.tic_tac_toe.train --help`, and with --review (of the e-mail agent)
    `python -m examples.email_search.review --help`.

    \b
    Examples:
      langchain-art demo --seed 1 --out out/demo
      langchain-art demo tic-tac-toe --control
      langchain-art demo --review scripted
    """
    from langchain_art.cli.new import EMAIL, examples_root, find_example, require_imports
    from langchain_art.client.local_server import require_server

    require_server()
    named = bool(context.args) and not context.args[0].startswith("-")
    name, arguments = (context.args[0], context.args[1:]) if named else (EMAIL, context.args)
    package = find_example(name)
    if reviewer and package != find_example(EMAIL):
        raise ConfigError(f"got --review of {name}, expected it of {EMAIL}, which has a reviewer")
    require_imports(package)
    # The examples need not be in this directory: they come with the installed package.
    path = [str(examples_root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    _become(f"examples.{package}.{'review' if reviewer else 'train'}", arguments)


@app.command()
def new(
    directory: Annotated[Path, typer.Argument(help="A new directory, which names the project.")],
    example: Annotated[
        str | None, typer.Option("--from", help="The example, such as tic-tac-toe.")
    ] = None,
    skill: Annotated[
        bool,
        typer.Option("--skill", help="Write a skill for coding agents; alone: into a project."),
    ] = False,
) -> None:
    """Make a project of your own from one of the examples, with a test.

    \b
    Examples:
      langchain-art new my-agent --from tic-tac-toe
      langchain-art new . --skill
    """
    from langchain_art.cli.new import make_project, write_skill

    if example is None and not skill:
        raise ConfigError("got neither --from EXAMPLE nor --skill, expected one of them or both")
    if example is not None:
        package = make_project(directory, example)
        console.print(f"{directory} is a project now: README.md says how to train {package}.")
    if skill:
        console.print(f"{write_skill(directory)} tells coding agents how to train this project.")


def _become(module: str, arguments: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


@app.command()
def status(base_url: BaseUrl = None, as_json: AsJson = False) -> None:
    """The server's model, policies, and counts of calls, runs and jobs.

    \b
    Example:
      langchain-art status --json | jq .policies
    """
    from langchain_art.cli.tables import status_table

    with client_of(base_url) as client:
        found = client.status()
    show(found, as_json, status_table)


@app.command()
def runs(
    run_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Show this run, turn by turn. A beginning is enough."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Newest first.")] = 20,
    scenario: Annotated[str | None, typer.Option(help="Only runs of this scenario.")] = None,
    delete: Annotated[bool, typer.Option(help="Delete the run ID, and its calls.")] = False,
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the runs that the server has, show one of them, or delete it.

    Runs of training and of evaluations are listed together; those of evaluations say so.

    \b
    Examples:
      langchain-art runs --scenario q-7
      langchain-art runs 0b1f6c2a
      langchain-art runs 0b1f6c2a --delete
    """
    from langchain_art.cli.tables import run_view, runs_table

    if delete and run_id is None:
        raise ConfigError("got --delete without the id of a run; add it: runs ID --delete")
    with client_of(base_url) as client:
        if delete and run_id is not None:
            console.print(f"{client.delete_trajectory(find_run(client, run_id))} is deleted")
        elif run_id is not None:
            show(redacted(find_run(client, run_id)), as_json, run_view)
        else:
            show(redacted(client.trajectories(limit, scenario)), as_json, runs_table)


@app.command()
def audit(
    run_id: Annotated[str, typer.Argument(metavar="ID", help="A run, as `runs` lists it.")],
    policy: Annotated[
        str | None, typer.Option(help="The policy that is to learn. Default: what sampled it.")
    ] = None,
    trainable: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=true|false", help="Which calls learn; may be repeated."),
    ] = None,
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show which of a run's tokens are trained, turn by turn, and why others are excluded.

    \b
    Examples:
      langchain-art audit 0b1f6c2a
      langchain-art audit 0b1f6c2a --policy writer --trainable critic=false
    """
    from langchain_art.cli.tables import audit_table

    with client_of(base_url) as client:
        run = find_run(client, run_id)
        found = client.audit(run, policy, dict(map(_choice, trainable or [])))
    sums = {"sampled_tokens": found.sampled_tokens, "trained_tokens": found.trained_tokens}
    show(found, as_json, audit_table, **sums)


def _choice(text: str) -> tuple[str, bool]:
    name, _, learns = text.rpartition("=")
    if not name or learns not in ("true", "false"):
        raise ConfigError(f"got --trainable {text}, expected NAME=true or NAME=false")
    return name, learns == "true"


@app.command("eval")
def evaluate(
    rollout: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="The rollout.")],
    scenarios: Annotated[
        str, typer.Argument(help="A JSONL file, or MODULE:NAME of a sequence or a function.")
    ],
    policy: Annotated[str, typer.Option(help="Policy or POLICY@N; @0 equals the base model.")],
    samples: Annotated[int, typer.Option(min=1, help="Runs per scenario.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Most runs at once.")] = 64,
    root: Root = Path("out"),
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Mean reward of a rollout on scenarios, with its 95 % interval.

    The rollout's own ChatART is called, with its settings, under the name that --policy gives: the
    default of its parameter `model`, or those of its program, in bindings and graphs too. If it has
    none, a parameter `model` gets one with the settings of the policy's latest fit below
    --root. What differs from the settings in training is said. A call of another version ends the
    evaluation at once.

    \b
    Example:
      langchain-art eval my_agent:rollout held_out.jsonl --policy email-agent@17
    """
    from langchain_art.cli.load_rollout import load_scenarios, rollout_of
    from langchain_art.training.trainer import Trainer

    chosen, loaded = load_scenarios(scenarios), rollout_of(rollout, policy, base_url, root)
    with client_of(base_url) as client:
        trainer = Trainer(policy, client=client, concurrency=concurrency, console=stderr)
        result = trainer.evaluate_sync(loaded, chosen, samples=samples)
    show(result, as_json, lambda found: Text(f"{found.version}: {found}"))


@app.command()
def export(
    name: Annotated[str, typer.Argument(metavar="POLICY[@N]", help="Default: what serves.")],
    directory: Annotated[Path, typer.Argument(help="A new directory.")],
    merge: Annotated[bool, typer.Option(help="Write whole weights, adapter merged in.")] = False,
    float32: Annotated[bool, typer.Option("--float32", help="Merge without rounding.")] = False,
    base: Annotated[
        str | None, typer.Option(help="Base model. Default: as the server names it.")
    ] = None,
    root: Root = Path("out"),
    base_url: BaseUrl = None,
) -> None:
    """Download an adapter in PEFT's format, with a model card. The server keeps what was exported.

    The card has the rewards of the fit that made it, where its folder is below --root.

    \b
    Examples:
      langchain-art export email-agent@17 out/email-agent
      langchain-art export email-agent out/merged --merge --base Qwen/Qwen2.5-0.5B-Instruct
    """
    from langchain_art.cli.export import export_adapter, export_merged
    from langchain_art.wire.identifiers import is_folder

    if float32 and not merge:
        raise ConfigError("got --float32 without --merge; an adapter is exported as it is")
    policy, _, version = name.partition("@")
    with client_of(base_url, patience=60.0) as client:
        number = split_version(name)[1] if version else client.policy(policy).version
        if merge:
            export_merged(client, policy, number, directory, base, root=root, float32=float32)
        else:
            export_adapter(client, policy, number, directory, base, root=root)
        say(f"{policy}@{number} is in {directory}")
        if is_folder(named := base or client.status().model_path):
            lacks = "" if merge else "; who lacks the folder needs whole weights (--merge)"
            say(f"{directory}/README.md names its base by the folder {named}: edit that{lacks}")
        if number:  # the first version is always kept
            try:
                client.pin(policy, number)
            except Conflict as full:
                say(str(full))


if __name__ == "__main__":
    main()
