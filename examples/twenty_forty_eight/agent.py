"""The agent: it is shown the board, moves, and is shown the next one, until the game is over."""

from __future__ import annotations

import re
from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from examples.twenty_forty_eight.environment import MAX_MOVES, MOVES, Game, describe

SYSTEM_PROMPT = "You play 2048. Answer with left, right, up or down."


class State(TypedDict):
    """The game that is played; the graph changes it."""

    game: Game


def read_move(reply: str) -> str | None:
    """The move that a reply names, its last such word; None without one."""
    named = re.findall(rf"\b({'|'.join(MOVES)})\b", reply.casefold())
    return named[-1] if named else None


def build_agent(model: BaseChatModel) -> CompiledStateGraph:
    """Build the agent as a LangGraph graph; one serves all games.

    Each move is asked for with the board alone: what came before does not matter in 2048.

    Args:
        model: Any chat model.

    Returns:
        The graph, to be run with `await agent.ainvoke({"game": Game("seed")})`. The nodes are
        coroutines, so `invoke` does not work.
    """

    async def player(state: State) -> dict[str, Any]:
        game = state["game"]
        messages = [("system", SYSTEM_PROMPT), ("user", describe(game.board))]
        reply = await model.ainvoke(messages)
        game.play(read_move(reply.text))
        return {"game": game}

    async def go_on(state: State) -> str:
        return END if state["game"].is_over else "player"

    graph = StateGraph(State)
    graph.add_node("player", player)
    graph.add_edge(START, "player")
    graph.add_conditional_edges("player", go_on, ["player", END])
    return graph.compile().with_config(recursion_limit=MAX_MOVES + 5)
