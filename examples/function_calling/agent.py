"""The agent: a request becomes one call of a function. Nothing in it knows of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolCall
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

CALLER_PROMPT = (
    "Call the function that does what the user asks for. Take the arguments from the request, and "
    "leave out those that it does not mention."
)


class State(TypedDict):
    """A request, the functions at hand, and what was called."""

    request: str
    functions: list[dict[str, Any]]
    calls: NotRequired[list[ToolCall]]


def build_agent(model: BaseChatModel, shots: Sequence[BaseMessage] = ()) -> CompiledStateGraph:
    """Build the agent: ``await agent.ainvoke({"request": text, "functions": [...]})`` has `calls`.

    Args:
        model: any chat model that calls tools.
        shots: solved requests that each prompt begins with.
    """

    async def caller(state: State) -> dict[str, list[ToolCall]]:
        bound = model.bind_tools(state["functions"], tool_choice="any", parallel_tool_calls=False)
        request = HumanMessage(state["request"])
        reply = await bound.ainvoke([SystemMessage(CALLER_PROMPT), *shots, request])
        return {"calls": reply.tool_calls}

    graph = StateGraph(State)
    graph.add_node("caller", caller)
    graph.add_edge(START, "caller")
    graph.add_edge("caller", END)
    return graph.compile()
