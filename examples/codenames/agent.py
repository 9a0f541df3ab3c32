"""The program: a spymaster and a guesser, each with a chat model. Nothing in it knows of training.

```text
START -> spymaster -> guesser -> spymaster -> ... -> END
```

A clue that breaks the rules costs the turn, and the spymaster goes on with the next one.
"""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from typing_extensions import TypedDict

from examples.codenames.environment import Game

SPYMASTER_PROMPT = (
    "You are the spymaster. Give a clue for your own words and no others: one word that is not on"
    " the board, and a number. Reply: clue: WORD NUMBER"
)
GUESSER_PROMPT = (
    "You are the guesser. Name the words that the clue is for, best first. Reply: guess: WORD WORD"
)


class State(TypedDict):
    """The game as it stands."""

    game: Game


def spymaster_view(game: Game) -> str:
    """The cards that are left, and whose they are."""
    others = [card for card in game.cards if card in game.board.others]
    return f"own: {' '.join(game.own)}\nothers: {' '.join(others)}\nassassin: {game.board.assassin}"


def guesser_view(game: Game) -> str:
    """The cards that are left, and the clue.

    Raises:
        ValueError: If no clue was given.
    """
    if game.clue is None:
        raise ValueError("no clue was given, so there is nothing to guess")
    return f"board: {' '.join(game.cards)}\nclue: {game.clue.word} {game.clue.count}"


def build_agent(spymaster: BaseChatModel, guesser: BaseChatModel) -> CompiledStateGraph:
    """Build the program as a LangGraph graph; one serves all games.

    Args:
        spymaster: any chat model.
        guesser: any chat model, the same or another one.

    Returns:
        The graph, to be run with `await agent.ainvoke({"game": Game(board)})`.

    Example:
        >>> agent = build_agent(model, model)  # doctest: +SKIP
        >>> state = await agent.ainvoke({"game": Game(board)})  # doctest: +SKIP
        >>> reward(state["game"])  # doctest: +SKIP
        0.75
    """

    async def give_clue(state: State) -> dict[str, Any]:
        game = state["game"]
        reply = await spymaster.ainvoke(
            [SystemMessage(SPYMASTER_PROMPT), HumanMessage(spymaster_view(game))]
        )
        return {"game": game.hint(reply.text)}

    async def pick_cards(state: State) -> dict[str, Any]:
        game = state["game"]
        reply = await guesser.ainvoke(
            [SystemMessage(GUESSER_PROMPT), HumanMessage(guesser_view(game))]
        )
        return {"game": game.guess(reply.text)}

    def next_node(state: State) -> str:
        game = state["game"]
        if game.clue is not None:
            return "guesser"
        return END if game.over else "spymaster"

    graph = StateGraph(State)
    graph.add_node("spymaster", give_clue)
    graph.add_node("guesser", pick_cards)
    graph.add_edge(START, "spymaster")
    graph.add_conditional_edges("spymaster", next_node, ["spymaster", "guesser", END])
    graph.add_conditional_edges("guesser", next_node, ["spymaster", END])
    return graph.compile()
