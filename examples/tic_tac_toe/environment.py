"""Tic-tac-toe: the rules, a perfect player, and the games that are played.

A board is a text of nine marks, row by row: ``X``, ``O``, or ``.`` for a free square. X begins. The
squares are named a to i.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Literal

Mark = Literal["X", "O"]
Player = Literal["self", "older", "perfect"]

EMPTY = "." * 9
SQUARES = "abcdefghi"
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
#: Share of training games from so many random moves on.
OPENINGS = {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}
#: Every so many-th training game is played against an older version.
OLDER_EVERY = 4


@dataclass(frozen=True)
class Scenario:
    """One game.

    Attributes:
        id: Also the seed of the perfect player's choices.
        board: The position that it begins from.
        learner: The side of the policy; of the opponent if that is the policy itself.
        opponent: "self": the policy plays both sides.
    """

    id: str
    board: str
    learner: Mark
    opponent: Player


def free(board: str) -> list[int]:
    """The free squares, as indices from 0."""
    return [square for square, mark in enumerate(board) if mark == "."]


def winner(board: str) -> Mark | None:
    """Who has three in a row; None if nobody has."""
    for one, two, three in LINES:
        if board[one] != "." and board[one] == board[two] == board[three]:
            return "X" if board[one] == "X" else "O"
    return None


def is_over(board: str) -> bool:
    """Whether somebody has won or no square is free."""
    return winner(board) is not None or "." not in board


def to_move(board: str) -> Mark:
    """Whose turn it is."""
    return "X" if board.count("X") == board.count("O") else "O"


def other(mark: Mark) -> Mark:
    """The opponent."""
    return "O" if mark == "X" else "X"


def play(board: str, square: int) -> str:
    """The board after the move of whoever's turn it is.

    Raises:
        ValueError: If the game is over, or the square is not free or no square.
    """
    if is_over(board) or square not in free(board):
        raise ValueError(f"got the square {square} on the board {board!r}, expected a free one")
    return board[:square] + to_move(board) + board[square + 1 :]


def winning_squares(board: str, mark: Mark) -> list[int]:
    """The free squares that would give `mark` three in a row."""
    return [
        square
        for square in free(board)
        if winner(board[:square] + mark + board[square + 1 :]) == mark
    ]


@cache
def value(board: str) -> int:
    """What the position is worth to X if both play perfectly: 1 won, 0 drawn, -1 lost (minimax)."""
    if (won := winner(board)) is not None:
        return 1 if won == "X" else -1
    values = [value(play(board, square)) for square in free(board)]
    if not values:
        return 0
    return max(values) if to_move(board) == "X" else min(values)


def best_moves(board: str) -> list[int]:
    """All moves that keep the value of the position for whoever's turn it is."""
    return [square for square in free(board) if value(play(board, square)) == value(board)]


def describe(board: str) -> str:
    """The position as the one to move is told it, with the squares that would end the game."""
    cells = [mark if mark != "." else SQUARES[at] for at, mark in enumerate(board)]
    rows = [" " + " ".join(cells[at : at + 3]) for at in (0, 3, 6)]
    me = to_move(board)
    ends = [_named(winning_squares(board, mark)) for mark in (me, other(me))]
    rows.append(f"You are {me}. You win at {ends[0]}. {other(me)} wins at {ends[1]}.")
    return "\n".join(rows)


def _named(squares: list[int]) -> str:
    return " ".join(SQUARES[square] for square in squares) or "none"


def random_board(rng: random.Random, moves: int) -> str:
    """A position after so many random moves, in which the game is not over."""
    while True:
        board = EMPTY
        for _ in range(moves):
            if not is_over(board):
                board = play(board, rng.choice(free(board)))
        if not is_over(board):
            return board


def training_games(count: int, seed: int) -> list[Scenario]:
    """Games of the policy against itself, every fourth against an older version of it."""
    found: list[Scenario] = []
    for number in range(count):
        rng = random.Random(f"train-{seed}-{number}")
        board = random_board(rng, rng.choices(list(OPENINGS), list(OPENINGS.values()))[0])
        opponent: Player = "older" if number % OLDER_EVERY == OLDER_EVERY - 1 else "self"
        side: Mark = rng.choice(("X", "O"))
        found.append(Scenario(f"train-{seed}-{number}", board, side, opponent))
    return found


def held_out_games(count: int, seed: int) -> list[Scenario]:
    """Games from the empty board against the perfect player, as X and O by turns."""
    return [
        Scenario(f"test-{seed}-{number}", EMPTY, "OX"[number % 2], "perfect")  # type: ignore[arg-type]
        for number in range(count)
    ]
