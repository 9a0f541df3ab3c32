"""Options of several commands: the server's address, its client, and how they print."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console

from langchain_art.errors import ConfigError, NotFound
from langchain_art.wire import Trajectory
from langchain_art.wire.redaction import redact_values

if TYPE_CHECKING:
    from rich.console import RenderableType

    from langchain_art.client.sync_client import ArtClient

Found = TypeVar("Found", bound="BaseModel | Sequence[BaseModel]")
console = Console()
stderr = Console(stderr=True)
#: Runs that are listed where the beginning of an id is that of several.
_LISTED = 8

BaseUrl = Annotated[
    str | None,
    typer.Option(envvar="ART_BASE_URL", help="Server, with /v1.", show_default="localhost:8000"),
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines: JSON on standard output.")]


def say(line: str, *, on: Console = console, style: str | None = None) -> None:
    """Print a line as it is."""
    on.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def client_of(base_url: str | None, patience: float = 5.0) -> ArtClient:
    """A client of the server at `base_url`, or of the default one."""
    from langchain_art.client.sync_client import ArtClient

    return ArtClient(base_url, patience=patience)


def find_run(client: ArtClient, begun: str) -> Trajectory:
    """The run whose id is `begun`, or the only one whose id begins so.

    Raises:
        NotFound: there is none.
        ConfigError: there are several.
    """
    begun = begun.removesuffix("…")
    try:
        return client.trajectory(begun)
    except NotFound:
        found = client.trajectories(_LISTED + 1, prefix=begun)
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(
            f"got the run {begun!r}, but no run's id begins so; `langchain-art runs` lists them"
        )
    listed = "".join(f"\n  {run.id}  {run.scenario or '-'}" for run in found[:_LISTED])
    more = "\n  …" if len(found) > _LISTED else ""
    raise ConfigError(
        f"got the run {begun!r}, and several ids begin so; write more of one:{listed}{more}"
    )


def split_version(name: str) -> tuple[str, int]:
    """``email-agent@17`` as policy and version. Raises ConfigError."""
    policy, _, version = name.partition("@")
    if not policy or not version.isdigit():
        raise ConfigError(f"got {name!r}, expected POLICY@N, such as email-agent@17")
    return policy, int(version)


def redacted(found: Found) -> Found:
    """Runs for a terminal or a bug report: secrets in their messages and metadata are not shown."""
    if isinstance(found, BaseModel):
        return type(found).model_validate(redact_values(found.model_dump(mode="json")))
    return [redacted(one) for one in found]  # type: ignore[return-value]


def show(found: Found, as_json: bool, view: Callable[[Found], RenderableType], **more: Any) -> None:
    """Print what was found as people read it, or as JSON with the fields `more`."""
    if not as_json:
        console.print(view(found))
        return
    if isinstance(found, BaseModel):
        value: Any = found.model_dump(mode="json") | more
    else:
        value = [one.model_dump(mode="json") for one in found]
    typer.echo(json.dumps(value, indent=2, allow_nan=False))
