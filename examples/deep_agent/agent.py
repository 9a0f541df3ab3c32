"""The agent: LangChain's deep agent with a sub-agent and files. Nothing in it knows of training."""

from __future__ import annotations

from typing import Any

from deepagents import FilesystemMiddleware, create_deep_agent
from deepagents.backends.utils import create_file_data
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Overwrite

from examples.support.call_cap import CallCap

FILE = "/statements.txt"
SYSTEM_PROMPT = "Let the searcher find it, then answer with the name alone."
SEARCHER_PROMPT = f"Find it in {FILE} and say the name."
MAX_MODEL_CALLS = 4


class FileAway(AgentMiddleware[Any, Any, Any]):
    """Puts all of the user's text but its last line into a file, a sentence on each line."""

    async def abefore_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
        """Runs once, before the agent's first call."""
        asked = state["messages"][-1]
        text, _, question = asked.text.strip().rpartition("\n")
        lines = text.strip().replace(". ", ".\n")
        return {
            "messages": Overwrite([HumanMessage(question, id=asked.id)]),
            "files": {FILE: create_file_data(lines)},
        }


def build_agent(model: BaseChatModel) -> CompiledStateGraph[Any, Any, Any, Any]:
    r"""Build the agent; one serves all runs.

    Args:
        model: Any chat model that can call tools. The sub-agent has the same.

    Returns:
        The graph, to be run with `await agent.ainvoke({"messages": [("user", text)]})`, whose last
        message is the answer. What stands before the text's last line is a file.

    Example:
        >>> agent = build_agent(model)  # doctest: +SKIP
        >>> text = "Ann likes tea. Bob likes jam.\nWho likes jam?"
        >>> state = await agent.ainvoke({"messages": [("user", text)]})  # doctest: +SKIP
        >>> state["messages"][-1].text  # doctest: +SKIP
        'Bob'
    """
    searcher: Any = {
        "name": "searcher",
        "description": "Searches the file of statements.",
        "system_prompt": SEARCHER_PROMPT,
        "middleware": [
            FilesystemMiddleware(tools=["read_file", "grep"]),
            CallCap(MAX_MODEL_CALLS),
        ],
    }
    files = FilesystemMiddleware(tools=["read_file", "grep"])
    return create_deep_agent(
        model,
        system_prompt=SYSTEM_PROMPT,
        subagents=[searcher],
        middleware=[FileAway(), files, CallCap(MAX_MODEL_CALLS)],
    )
