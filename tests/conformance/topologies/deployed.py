"""An agent as it is deployed: it knows our server, and nothing of captures and trajectories."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_core.tools import tool

from langchain_art import ChatART


@tool
def look(what: str = "") -> str:
    """Look at something."""
    return f"seen {what}"


agent = create_agent(ChatART(model="tiny"), [look])  # the server's address: ART_BASE_URL
