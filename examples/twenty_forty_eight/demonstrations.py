"""Moves of a player without a plan, from which the warm start learns to name a direction.

A third of the moves are any direction, also one that changes nothing; a third make the most points;
a third make the fewest. So the model learns to read the points, and not which to prefer. The games
are longer than those that it plays afterwards, and have larger tiles.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

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
