"""Tools that the topologies' agents have, and an agent that is run once."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool

from tests.conformance.suite.harness import Kit, RunStep


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


def run_agent(kit: Kit, *script: Any, tools: Any = (look,), **options: Any) -> RunStep:
    """A step of the program: an agent of the model, led by `script`; `options` are the agent's."""
    return kit.run(create_agent(kit.model, tools, **options), kit.ask(*script))
