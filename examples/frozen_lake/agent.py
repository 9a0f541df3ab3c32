"""The agent: it is shown the lake and moves, until the walk is over. Nothing knows of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from examples.frozen_lake.environment import MAX_MOVES, Walk

SYSTEM_PROMPT = (
    "You are P on a frozen lake. Walk to the goal G and do not step into a hole H. "
    "Answer with JSON: the next move."
)


class State(TypedDict):
    """The walk; the graph goes on with it."""

    walk: Walk


def move_schema(moves: tuple[str, ...]) -> dict[str, Any]:
    """The schema of an answer that names one of the moves."""
    move = {"type": "string", "enum": list(moves)}
    return {
        "title": "Step",
        "description": "The next step",
        "type": "object",
        "properties": {"move": move},
        "required": ["move"],
        "additionalProperties": False,
    }


def build_agent(model: BaseChatModel, shots: Sequence[BaseMessage] = ()) -> CompiledStateGraph:
    """Build the agent: ``await agent.ainvoke({"walk": Walk(seed)})`` walks to the end.

    Each move is asked for with the lake as it is: how it came about does not matter.

    Args:
        model: any chat model with structured output.
        shots: answered boards that each prompt begins with.
    """

    async def act(state: State) -> State:
        walk = state["walk"]
        answers = model.with_structured_output(move_schema(walk.moves))
        asked = [SystemMessage(SYSTEM_PROMPT), *shots, HumanMessage(walk.view)]
        found = await answers.ainvoke(asked)
        assert isinstance(found, dict)
        walk.go(found["move"])
        return {"walk": walk}

    def go_on(state: State) -> str:
        return END if state["walk"].over else "act"

    graph = StateGraph(State)
    graph.add_node("act", act)
    graph.add_edge(START, "act")
    graph.add_conditional_edges("act", go_on, ["act", END])
    return graph.compile().with_config(recursion_limit=MAX_MOVES + 5)
