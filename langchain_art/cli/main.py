"""The command `langchain-art`. Every command but `serve` and `demo` only talks to a server."""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from langchain_art.cli.canary import canary
from langchain_art.cli.doctor import doctor
from langchain_art.cli.options import AsJson, BaseUrl, console, machine
from langchain_art.errors import ArtError, ConfigError

if TYPE_CHECKING:
    from langchain_art.client.sync_client import ArtClient

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
checkpoints_app = typer.Typer(
    no_args_is_help=True,
    help="List, pin, roll back and delete the versions of a policy."
    "\n\n\b\nExamples:\n"
    "  langchain-art checkpoints list email-agent\n"
    "  langchain-art checkpoints pin email-agent@17\n"
    "  langchain-art checkpoints rollback email-agent@12",
)
app.add_typer(checkpoints_app, name="checkpoints")
app.command()(canary)
app.command()(doctor)
VersionName = Annotated[str, typer.Argument(metavar="POLICY@N", help="A version: email-agent@17.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an `ArtError` becomes one message and exit code 1."""
    try:
        app(args=list(arguments) if arguments is not None else None)
    except ArtError as error:
        Console(stderr=True).print(f"[bold red]{type(error).__name__}:[/]", end=" ")
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def _client(base_url: str | None, patience: float = 5.0) -> ArtClient:
    from langchain_art.client.sync_client import ArtClient

    return ArtClient(base_url, patience=patience)


def _split(name: str) -> tuple[str, int]:
    policy, _, version = name.partition("@")
    if not policy or not version.isdigit():
        raise ConfigError(f"got {name!r}, expected POLICY@N, such as email-agent@17")
    return policy, int(version)


# --- processes --------------------------------------------------------------------------------


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],  # --help too is answered by the server's own parser
    }
)
def serve(context: typer.Context) -> None:
    """Serve a base model and its policies over OpenAI's API; `serve --help` lists the options."""
    from langchain_art.client.local_server import require_server

    require_server()
    _become("langchain_art_server", context.args)


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the mails and their order.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where results go.")] = None,
    control: Annotated[
        bool, typer.Option(help="Train on shuffled rewards: nothing should be learned.")
    ] = False,
    reward: Annotated[
        str | None, typer.Option(help="Of training runs: answer, or ruler (a judge alone).")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="RULER's: scripted (costs nothing), or openai/o3 …")
    ] = None,
) -> None:
    """Train a small e-mail agent on this machine, from server start to reward plot.

    \b
    Example (in a checkout of the repository):
      langchain-art demo --seed 1 --out out/demo
    """
    if not Path("examples/email_search/train.py").exists():
        raise ConfigError(
            "The demo is examples/email_search, which is part of the repository and not of the "
            "installed package. Clone the repository, install it with "
            '`pip install -e ".[local,examples]"`, and run `langchain-art demo` in its root.'
        )
    arguments: list[str] = []
    given = {"steps": steps, "seed": seed, "out": out, "reward": reward, "judge": judge}
    for name, value in given.items():
        arguments += [] if value is None else [f"--{name}", str(value)]
    arguments += ["--control"] * control
    _become("examples.email_search.train", arguments)


def _become(module: str, arguments: list[str]) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


# --- looking ----------------------------------------------------------------------------------


@app.command()
def status(base_url: BaseUrl = None, as_json: AsJson = False) -> None:
    """What the server is, what it serves and what it has done.

    \b
    Example:
      langchain-art status --json | jq .policies
    """
    from langchain_art.cli.tables import status_table

    with _client(base_url) as client:
        found = client.status()
    if as_json:
        machine(found.model_dump(mode="json"))
    else:
        console.print(status_table(found))


@app.command()
def runs(
    trajectory_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Show this run, turn by turn.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Newest first.")] = 20,
    scenario: Annotated[str | None, typer.Option(help="Only runs of this scenario.")] = None,
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the runs that the server has, or show one of them.

    \b
    Examples:
      langchain-art runs --scenario q-7
      langchain-art runs 0b1f6c…
    """
    from langchain_art.cli.tables import run_table, runs_table

    with _client(base_url) as client:
        if trajectory_id is not None:
            run = client.trajectory(trajectory_id)
            if as_json:
                machine(run.model_dump(mode="json"))
            else:
                console.print(run_table(run))
            return
        found = client.trajectories(limit, scenario)
    if as_json:
        machine([run.model_dump(mode="json") for run in found])
    else:
        console.print(runs_table(found))


@app.command()
def audit(
    trajectory_id: Annotated[str, typer.Argument(help="A run, as `runs` lists it.")],
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
    """Which of a run's tokens learn, turn by turn, and why the others do not.

    \b
    Examples:
      langchain-art audit 0b1f6c…
      langchain-art audit 0b1f6c… --policy writer --trainable critic=false
    """
    from langchain_art.cli.tables import audit_table

    with _client(base_url) as client:
        found = client.audit(trajectory_id, policy, dict(map(_choice, trainable or [])))
    if as_json:
        sums = {"sampled_tokens": found.sampled_tokens, "trained_tokens": found.trained_tokens}
        machine(found.model_dump(mode="json") | sums)
    else:
        console.print(audit_table(found))


def _choice(text: str) -> tuple[str, bool]:
    name, _, learns = text.rpartition("=")
    if not name or learns not in ("true", "false"):
        raise ConfigError(f"got --trainable {text}, expected NAME=true or NAME=false")
    return name, learns == "true"


# --- checkpoints ------------------------------------------------------------------------------


@checkpoints_app.command("list")
def list_checkpoints(
    policy: Annotated[str, typer.Argument(help="The policy's name.")],
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """The versions that the server keeps."""
    from langchain_art.cli.tables import checkpoints_table

    with _client(base_url) as client:
        found = client.checkpoints(policy)
    if as_json:
        machine([checkpoint.model_dump(mode="json") for checkpoint in found])
    else:
        console.print(checkpoints_table(found))


@checkpoints_app.command()
def pin(name: VersionName, base_url: BaseUrl = None) -> None:
    """Keep a version from being pruned."""
    with _client(base_url) as client:
        console.print(f"{client.pin(*_split(name)).name} is pinned")


@checkpoints_app.command()
def unpin(name: VersionName, base_url: BaseUrl = None) -> None:
    """Let a version be pruned again."""
    with _client(base_url) as client:
        console.print(f"{client.unpin(*_split(name)).name} is no longer pinned")


@checkpoints_app.command()
def rollback(name: VersionName, base_url: BaseUrl = None) -> None:
    """Serve this version under the policy's bare name; training goes on from it."""
    with _client(base_url) as client:
        done = client.rollback(*_split(name))
    console.print(f"{done.name} now serves @{done.version}")


@checkpoints_app.command()
def delete(name: VersionName, base_url: BaseUrl = None) -> None:
    """Delete a version that neither serves nor is pinned."""
    with _client(base_url) as client:
        console.print(f"{client.delete_checkpoint(*_split(name))} is deleted")


# --- work -------------------------------------------------------------------------------------


@app.command("eval")
def evaluate(
    rollout: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="The rollout.")],
    scenarios: Annotated[
        str, typer.Argument(help="A JSONL file, or MODULE:NAME of a sequence or a function.")
    ],
    policy: Annotated[str, typer.Option(help="Policy, POLICY@N, or the base model.")],
    samples: Annotated[int, typer.Option(min=1, help="Runs per scenario.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Most runs at once.")] = 64,
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Mean reward of a rollout on scenarios, with its 95 % interval.

    A rollout with a parameter `model` is handed a ChatART of --policy; one without makes its own
    model, and the command fails if that is not the one that --policy names.

    \b
    Example:
      langchain-art eval my_agent:rollout held_out.jsonl --policy email-agent@17
    """
    from langchain_art.cli.load_rollout import load_rollout, load_scenarios
    from langchain_art.training.trainer import Trainer

    run = load_rollout(rollout, policy, base_url)
    chosen = load_scenarios(scenarios)
    with _client(base_url) as client:
        trainer = Trainer(
            policy, client=client, concurrency=concurrency, console=Console(stderr=True)
        )
        result = asyncio.run(trainer.evaluate(run, chosen, samples=samples))
    if as_json:
        machine(result.model_dump(mode="json"))
    else:
        console.print(f"{result.version}: {result}", markup=False, highlight=False)


@app.command()
def export(
    name: Annotated[str, typer.Argument(metavar="POLICY[@N]", help="Default: what serves.")],
    directory: Annotated[Path, typer.Argument(help="A new directory.")],
    merge: Annotated[bool, typer.Option(help="Write whole weights, adapter merged in.")] = False,
    base: Annotated[
        str | None, typer.Option(help="Base model. Default: as the server names it.")
    ] = None,
    base_url: BaseUrl = None,
) -> None:
    """Download an adapter in PEFT's format, with a model card.

    \b
    Examples:
      langchain-art export email-agent@17 out/email-agent
      langchain-art export email-agent out/merged --merge --base Qwen/Qwen2.5-0.5B-Instruct
    """
    from langchain_art.cli.export import export_adapter, export_merged

    policy, _, version = name.partition("@")
    with _client(base_url, patience=60.0) as client:
        number = _split(name)[1] if version else client.policy(policy).version
        write = export_merged if merge else export_adapter
        write(client, policy, number, directory, base)
    console.print(f"{policy}@{number} is in {directory}", highlight=False)


if __name__ == "__main__":
    main()
