"""`langchain-art key` and `keys`: a server's own API key, and those of its tenants."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from langchain_art.cli.options import AsJson, BaseUrl, client_of, say, show, stderr
from langchain_art.errors import ConfigError
from langchain_art.wire.api_keys import DEFAULT_TENANT, SCOPES, KeyLimits, Scope

app = typer.Typer(
    no_args_is_help=True,
    help="Make, list and revoke API keys. All need the server's own key in ART_API_KEY."
    "\n\nA key belongs to a tenant: it sees and trains the tenant's runs, policies, calls and "
    "jobs, and no others. The base model is everybody's."
    "\n\n\b\nScopes:\n"
    "  infer   sample: chat completions\n"
    "  submit  store runs and rewards, make policies, train, pin, roll back, download\n"
    "  review  look at runs and policies, and review them\n"
    "  admin   all of these, and deletions; of the tenant 'default' also keys and the log"
    "\n\n\b\nExamples:\n"
    "  langchain-art keys create ana --tenant research\n"
    "  langchain-art keys create app --tenant shop --scope infer --calls-per-minute 600\n"
    "  langchain-art keys create ci --scope infer --scope submit --expires 30d\n"
    "  langchain-art keys revoke key-0123456789abcdef",
)
server_key = typer.Typer(
    no_args_is_help=True,
    help="Make the server's own API key, its administrator's; `langchain-art keys` makes others."
    "\n\n\b\nExample:\n"
    "  export ART_API_KEY=$(langchain-art key new)",
)
_UNITS = {"m": 60, "h": 3600, "d": 86400}
_limit = typer.Option(min=1, show_default="no limit")


def _ends(lasts: str | None) -> float | None:
    if lasts is None:
        return None
    if not (match := re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", lasts)):
        raise ConfigError(
            f"got --expires {lasts!r}, expected minutes, hours or days: 90m, 12h, 30d"
        )
    return time.time() + int(match[1]) * _UNITS[match[2]]


@server_key.command()
def new() -> None:
    """Print a new key, of 32 random bytes.

    \b
    Example:
      export ART_API_KEY=$(langchain-art key new)
    """
    from langchain_art.wire.api_keys import new_api_key

    typer.echo(new_api_key())


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="For people: whose it is, or what for.")],
    tenant: Annotated[
        str, typer.Option(help="Whose data it reaches; a new name is a new tenant.")
    ] = DEFAULT_TENANT,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Of {', '.join(SCOPES)}; may be repeated. Default: infer, submit, review."
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="90m, 12h or 30d.", show_default="never")
    ] = None,
    calls_per_minute: Annotated[int | None, _limit] = None,
    tokens_per_minute: Annotated[int | None, _limit] = None,
    concurrent_calls: Annotated[int | None, _limit] = None,
    stored_bytes: Annotated[int | None, _limit] = None,
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it: once, for the server keeps only a hash of it.

    Whoever has it sets ART_API_KEY to it. On standard output is the key alone.

    \b
    Example:
      langchain-art keys create ana --tenant research > ana.key
    """
    wanted = tuple(scope or ("infer", "submit", "review"))
    if unknown := sorted(set(wanted) - set(SCOPES)):
        raise ConfigError(f"got --scope {unknown[0]!r}, expected one of {', '.join(SCOPES)}")
    scopes: list[Scope] = [one for one in SCOPES if one in wanted]
    limits = KeyLimits(
        calls_per_minute=calls_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent_calls=concurrent_calls,
        stored_bytes=stored_bytes,
    )
    ends = _ends(expires)
    with client_of(base_url) as client:
        made = client.create_key(name, tenant=tenant, scopes=scopes, limits=limits, expires_at=ends)
    if as_json:
        typer.echo(made.model_dump_json(indent=2))
        return
    about = f"{made.id}: {', '.join(made.scopes)} of the tenant {made.tenant}."
    about += " Keep the key: it is not shown again."
    say(about, on=stderr)
    typer.echo(made.key)


@app.command("list")
def list_keys(base_url: BaseUrl = None, as_json: AsJson = False) -> None:
    """All keys that were ever made, without the keys themselves."""
    from langchain_art.cli.tables import keys_table

    with client_of(base_url) as client:
        show(client.api_keys(), as_json, keys_table)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `keys list` shows it.")],
    base_url: BaseUrl = None,
) -> None:
    """Revoke a key: within a second no server takes it."""
    with client_of(base_url) as client:
        revoked = client.revoke_key(key_id)
    say(f"{revoked.id} ({revoked.name}) is revoked")


@app.command()
def log(
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Newest first.")] = 50,
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """List who trained, rolled back, deleted, reviewed, made and revoked keys."""
    from langchain_art.cli.tables import log_table

    with client_of(base_url) as client:
        show(client.actions(limit), as_json, log_table)
