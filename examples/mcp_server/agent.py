"""The agent: a model with the tools of an MCP server. Nothing in it knows of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import BaseTool
from langgraph.graph.state import CompiledStateGraph

SYSTEM_PROMPT = "Use the tools, then answer with what was asked for and its number."
MAX_MODEL_CALLS = 5


def build_agent(
    model: BaseChatModel, tools: Sequence[BaseTool], max_model_calls: int = MAX_MODEL_CALLS
) -> CompiledStateGraph:
    """Build the agent as a LangGraph graph; one serves all runs.

    Args:
        model: Any chat model that can call tools.
        tools: Of an MCP server, as `langchain_mcp_adapters.tools.load_mcp_tools` gives them.
        max_model_calls: Most calls of the model in one run, which then ends with a note of it.

    Returns:
        The graph, to be run with `await agent.ainvoke({"messages": [("user", task)]})` while the
        session of the tools is open. MCP tools are coroutines, so `invoke` does not work.

    Example:
        >>> async with connect(server) as session:  # doctest: +SKIP
        ...     agent = build_agent(model, await load_mcp_tools(session))
        ...     state = await agent.ainvoke({"messages": [("user", task.text)]})
    """
    limit = ModelCallLimitMiddleware(run_limit=max_model_calls, exit_behavior="end")
    return create_agent(model, tools, system_prompt=SYSTEM_PROMPT, middleware=[limit])


def answer(state: dict[str, Any]) -> str:
    """What the agent answered: its last message, or nothing if that calls a tool."""
    last = state["messages"][-1]
    return last.text.strip(" .\n") if isinstance(last, AIMessage) and not last.tool_calls else ""
