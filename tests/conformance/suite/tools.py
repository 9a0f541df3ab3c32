"""Tools that the topologies' agents have."""

from __future__ import annotations

from langchain_core.tools import tool


@tool
def look(what: str = "") -> str:
    """Look at something."""
    return f"seen {what}"


@tool
def weigh(what: str = "") -> str:
    """Weigh something."""
    return f"{what} is heavy"


@tool
def drop(what: str = "") -> str:
    """Drop something."""
    raise ValueError(f"{what} is stuck")


LOOK = {"call": "look", "args": {"what": "door"}}
WEIGH = {"call": "weigh", "args": {"what": "door"}}
