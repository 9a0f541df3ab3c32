"""Tables of `langchain-art keys`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.markup import escape
from rich.table import Column, Table

from langchain_art.wire import ApiKey, LoggedAction


def keys_table(keys: Sequence[ApiKey]) -> Table:
    """Keys with their state and limits."""
    names = ("tenant", "name", "scopes", "limits", "state")
    table = Table(Column("id", no_wrap=True), *(Column(name, overflow="fold") for name in names))
    for key in keys:
        limits = [f"{name} {value}" for name, value in key.limits if value is not None]
        row = (key.tenant, key.name, " ".join(key.scopes), ", ".join(limits) or "-", _state(key))
        table.add_row(key.id, *map(escape, row))
    return table


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {_when(key.revoked_at)}"
    if key.expires_at is None:
        return "valid"
    return f"{'valid until' if time.time() < key.expires_at else 'expired'} {_when(key.expires_at)}"


def log_table(actions: Sequence[LoggedAction]) -> Table:
    """Entries of the log."""
    table = Table("when", "tenant", "key", "action", Column("what", overflow="fold"))
    for one in actions:
        row = (one.tenant, one.key or "-", one.action.replace("_", " "), one.subject)
        table.add_row(_when(one.at), *map(escape, row))
    return table


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
