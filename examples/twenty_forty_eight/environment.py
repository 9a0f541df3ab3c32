"""2048 on a board of three by three: the rules, the games, and the reward.

A board is a tuple of nine numbers, row by row; 0 is an empty square. Which tile comes after a move,
and where, depends on the game's seed and on how many moves were made: the same moves make the same
game.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

Board = tuple[int, ...]

SIZE = 3
TARGET = 16
MAX_MOVES = 12
MOVES = ("left", "right", "up", "down")
#: What a move that changes nothing costs, as a share of the target.
PENALTY = 0.25
#: As in the original game.
SHARE_OF_FOURS = 0.1


@dataclass(frozen=True)
class Scenario:
    """One game; `id` is its seed, `split` "train" or "test"."""

    id: str
    split: str


def merged(row: list[int]) -> tuple[list[int], int]:
    """A row slid towards its beginning, and the sum of the tiles that were made by merging.

    A tile that was made in this move is not merged again.
    """
    tiles = [tile for tile in row if tile]
    made: list[int] = []
    points = 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            points += tile
        made.append(tile)
    return made + [0] * (len(row) - len(made)), points


def lines(move: str) -> list[list[int]]:
    """The squares of each row or column, from the side that the move slides towards."""
    rows = [[row * SIZE + column for column in range(SIZE)] for row in range(SIZE)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    chosen = rows if move in ("left", "right") else columns
    return [line[::-1] for line in chosen] if move in ("right", "down") else chosen


def slide(board: Board, move: str) -> tuple[Board, int]:
    """The board after a move, before a new tile comes, and the points that it makes."""
    after, points = list(board), 0
    for line in lines(move):
        tiles, gained = merged([board[square] for square in line])
        points += gained
        for square, tile in zip(line, tiles, strict=True):
            after[square] = tile
    return tuple(after), points


def legal_moves(board: Board) -> list[str]:
    """The moves that change the board."""
    return [move for move in MOVES if slide(board, move)[0] != board]


@dataclass
class Game:
    """A game that is played.

    Attributes:
        seed: Of the tiles.
        board: The position.
        made: Moves so far, those that changed nothing included.
        gains: What each move made: the sum of the tiles that it made by merging; None if it changed
            nothing, or was no move.
        target: The tile that wins.
        max_moves: Moves after which the game is over.
    """

    seed: str
    board: Board = (0,) * SIZE**2
    made: int = 0
    gains: list[int | None] = field(default_factory=list)
    target: int = TARGET
    max_moves: int = MAX_MOVES

    def __post_init__(self) -> None:
        """Put the first two tiles on an empty board."""
        if not any(self.board):
            self._add_tile(random.Random(f"{self.seed}:first"))
            self._add_tile(random.Random(f"{self.seed}:second"))

    def _add_tile(self, rng: random.Random) -> None:
        square = rng.choice([at for at, tile in enumerate(self.board) if not tile])
        tile = 4 if rng.random() < SHARE_OF_FOURS else 2
        self.board = (*self.board[:square], tile, *self.board[square + 1 :])

    def play(self, move: str | None) -> None:
        """Make a move. One that changes nothing, or None, brings no tile and counts as made."""
        self.made += 1
        after, points = slide(self.board, move) if move in MOVES else (self.board, 0)
        self.gains.append(None if after == self.board else points)
        if after == self.board:
            return
        self.board = after
        self._add_tile(random.Random(f"{self.seed}:{self.made}"))

    @property
    def illegal(self) -> int:
        """Moves that changed nothing, and replies that were no move."""
        return self.gains.count(None)

    @property
    def highest(self) -> int:
        """The highest tile."""
        return max(self.board)

    @property
    def is_over(self) -> bool:
        """Won (the target is reached), lost (no move is left), or `max_moves` were made."""
        found = self.highest >= self.target or self.made >= self.max_moves
        return found or not legal_moves(self.board)


def describe(board: Board) -> str:
    """The board, and for each move the points that it makes; a move that does nothing has none."""
    rows = [board[at : at + SIZE] for at in range(0, SIZE**2, SIZE)]
    text = ["".join(f" {tile or '.'}" for tile in row) for row in rows]
    for move in MOVES:
        after, points = slide(board, move)
        text.append(f"{move}: " + ("nothing" if after == board else f"+{points}"))
    return "\n".join(text)


def reward(game: Game) -> float:
    """The highest tile, as a share of the target: 1 if it is reached, 0.5 if half of it is."""
    return game.highest / game.target


def move_rewards(game: Game) -> list[float]:
    """What each move of a game is worth by itself: the share of the target that it made.

    One that made nothing is worth 0, one that changed nothing ``-PENALTY``.
    """
    return [-PENALTY if gain is None else gain / game.target for gain in game.gains]


def random_game(seed: str) -> Game:
    """The same game, played by one who draws each move from those that change the board."""
    game, rng = Game(seed), random.Random(f"{seed}:player")
    while not game.is_over:
        game.play(rng.choice(legal_moves(game.board)))
    return game


def games(split: str, count: int, seed: int) -> list[Scenario]:
    """So many games of a split, "train" or "test"; none is in both."""
    return [Scenario(f"{split}-{seed}-{number}", split) for number in range(count)]
