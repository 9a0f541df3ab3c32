"""The agent: a router that answers by a schema. Nothing in it knows of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from pydantic import BaseModel, Field

from examples.triage.tickets import Department

ROUTER_PROMPT = (
    "You sort messages of customers. Name the department that has to answer: billing, technical, "
    "shipping or account. Answer with JSON."
)


class Route(BaseModel):
    """Where a message goes."""

    department: Department = Field(description="The department that has to answer")


class State(TypedDict):
    """A message on its way."""

    message: str
    department: NotRequired[Department]


def build_agent(model: BaseChatModel, shots: Sequence[BaseMessage] = ()) -> CompiledStateGraph:
    """Build the agent: ``await agent.ainvoke({"message": text})`` has the `department`.

    Args:
        model: any chat model with structured output.
        shots: routed messages that each prompt begins with.
    """
    router = model.with_structured_output(Route)

    async def route(state: State) -> dict[str, Department]:
        message = HumanMessage(state["message"])
        found = await router.ainvoke([SystemMessage(ROUTER_PROMPT), *shots, message])
        assert isinstance(found, Route)
        return {"department": found.department}

    graph = StateGraph(State)
    graph.add_node("router", route)
    graph.add_edge(START, "router")
    graph.add_edge("router", END)
    return graph.compile()
