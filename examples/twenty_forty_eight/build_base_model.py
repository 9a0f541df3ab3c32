"""Build the small base model that the example trains.

Run `python -m examples.twenty_forty_eight.build_base_model`. The warm start imitates a player
without a plan: the model can name moves, and has to learn which are good.

Moves of a player without a plan, from which the warm start learns to name a direction.

A third of the moves are any direction, also one that changes nothing; a third make the most points;
a third make the fewest. So the model learns to read the points, and not which to prefer. The games
are longer than those that it plays afterwards, and have larger tiles.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from examples.support import tiny_model
from examples.support.warm_start import WarmStart
from examples.twenty_forty_eight.agent import SYSTEM_PROMPT
from examples.twenty_forty_eight.environment import MOVES, Board, Game, describe, legal_moves, slide

#: Of the games that are shown.
TARGET = 32
MAX_MOVES = 25


def choose(rng: random.Random, board: Board) -> str:
    """A move of the player without a plan."""
    end: Callable[..., int] | None = rng.choice((None, min, max))
    if end is None:
        return rng.choice(MOVES)
    points = {move: slide(board, move)[1] for move in legal_moves(board)}
    wanted = end(points.values())
    return rng.choice([move for move, made in points.items() if made == wanted])


def demonstrations(count: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield single moves as conversations in OpenAI's shape, of as many games as it takes."""
    number, made = 0, 0
    while made < count:
        name = f"demo-{seed}-{number}"
        rng, game = random.Random(name), Game(name, target=TARGET, max_moves=MAX_MOVES)
        while not game.is_over and made < count:
            move = choose(rng, game.board)
            yield [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": describe(game.board)},
                {"role": "assistant", "content": move},
            ]
            game.play(move)
            made += 1
        number += 1


SEED = 1234
SHIPPED = Path(__file__).parent / "base_model"
WORDS = [*MOVES, " nothing", *(str(2**power) for power in range(1, 7)), "12", "20", "24", "28"]


def conversations(count: int) -> list[tiny_model.Conversation]:
    """Moves of the player without a plan."""
    return [tiny_model.Conversation(messages) for messages in demonstrations(count, SEED)]


RECIPE = tiny_model.Recipe(
    conversations,
    count=12_000,
    words=WORDS,
    vocab_size=384,
    plan=WarmStart(steps=600, copy_steps=150),
)

if __name__ == "__main__":
    tiny_model.main(RECIPE, SHIPPED)
