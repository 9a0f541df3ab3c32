"""The agent: search, filter, sort, select, answer. Nothing in it knows of training."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain.tools import ToolRuntime
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langgraph.graph.state import CompiledStateGraph

from examples.email_assistant.mailbox import Mailbox
from examples.support.answer_tool import answer
from examples.support.call_cap import CallCap

SYSTEM_PROMPT = "Find the mail that is asked for and answer with its date."
MAX_MODEL_CALLS = 7


@tool
async def search(query: str, runtime: ToolRuntime[Mailbox]) -> str:
    """List mails by words."""
    return runtime.context.search(query)


@tool("filter")
async def filter_(sender: str, runtime: ToolRuntime[Mailbox]) -> str:
    """Keep those of a sender."""
    return runtime.context.filter(sender)


@tool
async def sort(order: str, runtime: ToolRuntime[Mailbox]) -> str:
    """Sort the list: newest or oldest first."""
    return runtime.context.sort(order)


@tool
async def select(number: int, runtime: ToolRuntime[Mailbox]) -> str:
    """Open a mail of the list."""
    return runtime.context.select(number)


TOOLS = (search, filter_, sort, select, answer)


def build_agent(model: BaseChatModel, max_model_calls: int = MAX_MODEL_CALLS) -> CompiledStateGraph:
    """Build the agent; one serves all runs, each brings a `Mailbox` of its own.

    Args:
        model: any chat model that can call tools.
        max_model_calls: most calls of the model in one run, which then ends without an answer.

    Returns:
        The graph: `await agent.ainvoke({"messages": [("user", question)]}, context=mailbox)`.
    """
    return create_agent(
        model,
        TOOLS,
        system_prompt=SYSTEM_PROMPT,
        context_schema=Mailbox,
        middleware=[CallCap(max_model_calls)],
    )
