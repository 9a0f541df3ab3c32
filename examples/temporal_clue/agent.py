"""The program: one question, one long answer with a line for each part of it.

```text
START -> detective -> END
```
"""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from typing_extensions import TypedDict

SYSTEM_PROMPT = (
    "Who is the thief, where was the thief, when, and with what? You may think first. End with"
    " four lines: who: NAME, where: PLACE, when: HOUR, with: THING"
)


class State(TypedDict, total=False):
    """The case as it is told, and what the detective says to it."""

    case: str
    answer: str


def build_agent(model: BaseChatModel) -> CompiledStateGraph:
    """Build the program as a LangGraph graph; one serves all puzzles.

    Args:
        model: any chat model.

    Returns:
        The graph, to be run with `await agent.ainvoke({"case": puzzle.text})`.

    Example:
        >>> agent = build_agent(model)  # doctest: +SKIP
        >>> state = await agent.ainvoke({"case": puzzle.text})  # doctest: +SKIP
        >>> reward(puzzle, state["answer"])  # doctest: +SKIP
        0.5
    """

    async def detective(state: State) -> dict[str, Any]:
        reply = await model.ainvoke([SystemMessage(SYSTEM_PROMPT), HumanMessage(state["case"])])
        return {"answer": reply.text}

    graph = StateGraph(State)
    graph.add_node("detective", detective)
    graph.add_edge(START, "detective")
    graph.add_edge("detective", END)
    return graph.compile()
