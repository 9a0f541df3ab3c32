"""The agent: a graph in which the players move by turns. Nothing in it knows of training."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypedDict

from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime

from examples.tic_tac_toe.environment import (
    EMPTY,
    SQUARES,
    Mark,
    Player,
    best_moves,
    describe,
    free,
    is_over,
    other,
    play,
    to_move,
    winner,
)

SYSTEM_PROMPT = "You play tic-tac-toe. Answer with the letter of a free square."


class State(TypedDict, total=False):
    """A game: its board, and who lost it by a reply that was no free square."""

    board: str
    illegal: Mark


@dataclass(frozen=True)
class Match:
    """Who plays the side that the agent does not play.

    Attributes:
        learner: The agent's side.
        opponent: "self": the agent plays both sides; "older": `older` plays the other one.
        older: The chat model of such an opponent.
        seed: Of the perfect player, who draws among the moves that are equally good.
    """

    learner: Mark = "X"
    opponent: Player = "perfect"
    older: BaseChatModel | None = None
    seed: str = ""

    def player(self, board: str) -> str:
        """The node that moves next."""
        mark = to_move(board)
        mine = mark == self.learner or self.opponent == "self"
        return mark.lower() if mine else self.opponent


def read_square(reply: str) -> int | None:
    """The square that a reply names, its last single letter from a to i; None without one."""
    named = re.findall(rf"\b[{SQUARES}]\b", reply.casefold())
    return SQUARES.index(named[-1]) if named else None


async def _ask(model: BaseChatModel, board: str) -> State:
    reply = await model.ainvoke([("system", SYSTEM_PROMPT), ("user", describe(board))])
    square = read_square(reply.text)
    if square not in free(board):
        return {"illegal": to_move(board)}
    return {"board": play(board, square)}


def build_agent(model: BaseChatModel) -> CompiledStateGraph:
    """Build the agent as a LangGraph graph; one serves all games, each brings its `Match`.

    The nodes `x` and `o` call the model, one for each side; `older` calls the model of the match,
    and `perfect` calls none.

    Args:
        model: Any chat model.

    Returns:
        The graph, to be run with `await agent.ainvoke({"board": EMPTY}, context=Match("X"))`. The
        nodes are coroutines, so `invoke` does not work.
    """

    async def own(state: State) -> State:
        return await _ask(model, state["board"])

    async def older(state: State, runtime: Runtime[Match]) -> State:
        if runtime.context.older is None:
            raise ValueError("got a Match against an older model without one, expected older=")
        return await _ask(runtime.context.older, state["board"])

    async def perfect(state: State, runtime: Runtime[Match]) -> State:
        board = state["board"]
        drawn = random.Random(f"{runtime.context.seed}:{board}").choice(best_moves(board))
        return {"board": play(board, drawn)}

    async def next_player(state: State, runtime: Runtime[Match]) -> str:
        if state.get("illegal") or is_over(state["board"]):
            return END
        return runtime.context.player(state["board"])

    graph = StateGraph(State, context_schema=Match)
    nodes: dict[str, Callable[..., Awaitable[State]]] = {
        "x": own,
        "o": own,
        "older": older,
        "perfect": perfect,
    }
    for name, node in nodes.items():
        graph.add_node(name, node)
    for name in (START, *nodes):
        graph.add_conditional_edges(name, next_player, [*nodes, END])
    return graph.compile()


def points(state: State) -> dict[Mark, float]:
    """What the game was worth to each side: 1 won, 0.5 drawn, 0 lost.

    A reply that names no free square loses the game; the other side has not won by it, and gets
    0.5.
    """
    if mark := state.get("illegal"):
        return {mark: 0.0, other(mark): 0.5}
    won = winner(state.get("board", EMPTY))
    if won is None:
        return {"X": 0.5, "O": 0.5}
    return {won: 1.0, other(won): 0.0}
