"""`langchain-art checkpoints`: the versions of a policy."""

from __future__ import annotations

from typing import Annotated

import typer

from langchain_art.cli.options import AsJson, BaseUrl, client_of, console, show, split_version

app = typer.Typer(
    no_args_is_help=True,
    help="List, pin, roll back and delete the versions of a policy."
    "\n\n\b\nExamples:\n"
    "  langchain-art checkpoints list email-agent\n"
    "  langchain-art checkpoints pin email-agent@17\n"
    "  langchain-art checkpoints rollback email-agent@12\n"
    "  langchain-art checkpoints delete-policy email-agent",
)
VersionName = Annotated[str, typer.Argument(metavar="POLICY@N", help="A version: email-agent@17.")]


@app.command("list")
def list_checkpoints(
    policy: Annotated[str, typer.Argument(help="The policy's name.")],
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """The versions that the server keeps."""
    from langchain_art.cli.tables import checkpoints_table

    with client_of(base_url) as client:
        show(client.checkpoints(policy), as_json, checkpoints_table)


@app.command()
def pin(name: VersionName, base_url: BaseUrl = None) -> None:
    """Keep a version from being pruned."""
    with client_of(base_url) as client:
        console.print(f"{client.pin(*split_version(name)).name} is pinned")


@app.command()
def unpin(name: VersionName, base_url: BaseUrl = None) -> None:
    """Let a version be pruned again."""
    with client_of(base_url) as client:
        console.print(f"{client.unpin(*split_version(name)).name} is no longer pinned")


@app.command()
def rollback(
    name: VersionName,
    why: Annotated[str, typer.Option(help="Shown with the versions that it discards.")] = "",
    base_url: BaseUrl = None,
) -> None:
    """Serve this version under the policy's name without @N; training continues from it."""
    with client_of(base_url) as client:
        done = client.rollback(*split_version(name), why)
    console.print(f"{done.name} now serves @{done.version}")


@app.command()
def delete(name: VersionName, base_url: BaseUrl = None) -> None:
    """Delete a version that neither serves nor is pinned."""
    with client_of(base_url) as client:
        console.print(f"{client.delete_checkpoint(*split_version(name))} is deleted")


@app.command("delete-policy")
def delete_policy(
    policy: Annotated[str, typer.Argument(help="The policy's name.")], base_url: BaseUrl = None
) -> None:
    """Delete a policy, with all its versions, that no job and no call uses."""
    with client_of(base_url) as client:
        console.print(f"{client.delete_policy(policy)} is deleted")
