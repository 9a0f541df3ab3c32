"""Lakes of TextArena's Frozen Lake, and a walk over one.

The rules and the reward are TextArena's. What is added: which moves are open, so that an answer can
be held to them; a board of 16 signs in place of one of 300, with what the next squares and the way
to the goal are, since so small a model reads no columns; and a division of the lakes into those
that are trained on and those that are held out.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import textarena

#: Four by four squares and three holes; the walk begins in any corner and ends in the opposite one.
ENVIRONMENT = "FrozenLake-v0-random-raw"
#: Moves of a walk. The shortest way has six.
MAX_MOVES = 8
#: Of three lakes, one is held out.
PARTS = 3

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Lake:
    """One scenario: `id` says the part and number, `seed` makes the lake."""

    id: str
    seed: int


class Walk:
    """A walk over one lake.

    Args:
        seed: Of the lake.
    """

    def __init__(self, seed: int) -> None:
        self._env: Any = textarena.make(ENVIRONMENT)
        state = random.getstate()
        try:
            self._env.reset(num_players=1, seed=seed)  # seeds the generator of the whole process
        finally:
            random.setstate(state)
        self._env.state.max_turns = MAX_MOVES - 1  # it looks at them before it counts a move

    @property
    def board(self) -> str:
        """The lake, row by row: P the walker, H a hole, G the goal."""
        game = self._env.state.game_state
        rows = [[square.strip() or "." for square in row] for row in game["grid"]]
        row, column = game["player_pos"]
        rows[row][column] = "P"
        return "\n".join(" ".join(row) for row in rows)

    @property
    def view(self) -> str:
        """The board, where the goal is, and what each open move steps on."""
        game = self._env.state.game_state
        (row, column), (goal_row, goal_column) = game["player_pos"], game["goal_pos"]
        up, right = row - goal_row, goal_column - column
        away = [f"{abs(up)} {'up' if up > 0 else 'down'}"] if up else []
        away += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
        squares = {"H": "hole", "G": "goal"}
        ahead = [
            f"{move}: {squares.get(game['grid'][row + by][column + to].strip(), 'ice')}"
            for move in self.moves
            for by, to in [self._env.actions[move]]
        ]
        return "\n".join([self.board, "", *ahead, f"The goal is {' and '.join(away)}."])

    @property
    def moves(self) -> tuple[str, ...]:
        """The moves that do not leave the lake."""
        row, column = self._env.state.game_state["player_pos"]
        inside = range(self._env.size)
        ways: dict[str, tuple[int, int]] = self._env.actions
        return tuple(
            name for name, (by, to) in ways.items() if row + by in inside and column + to in inside
        )

    @property
    def way(self) -> list[str]:
        """Moves of a shortest way to the goal over the ice; empty if there is none."""
        game = self._env.state.game_state
        ways = deque[tuple[tuple[int, int], list[str]]]([(tuple(game["player_pos"]), [])])
        seen = {ways[0][0]}
        while ways:
            (row, column), moves = ways.popleft()
            if [row, column] == list(game["goal_pos"]):
                return moves
            for move, (by, to) in self._env.actions.items():
                at = row + by, column + to
                inside = max(at) < self._env.size and min(at) >= 0
                if inside and at not in seen and game["grid"][at[0]][at[1]].strip() != "H":
                    seen.add(at)
                    ways.append((at, [*moves, move]))
        return []

    def go(self, move: str) -> None:
        """Make a move."""
        self._env.step(f"[{move}]")

    @property
    def over(self) -> bool:
        """At the goal, in a hole, or after `MAX_MOVES`."""
        return self._env.state.done

    @property
    def reward(self) -> float:
        """TextArena's: 1 at the goal; else how far from the start, as a share of the whole way."""
        rewards, _ = self._env.close()
        return float(rewards[0])


def lakes(split: Split, count: int, seed: int = 0) -> list[Lake]:
    """So many different lakes of a part; what is on a lake says which part it is in.

    Raises:
        ValueError: The part has fewer lakes.
    """
    drawn = random.Random(f"{split}:{seed}")
    found: dict[str, int] = {}
    for _ in range(100 * count):
        number = drawn.randrange(2**31)
        board = Walk(number).board
        held_out = int(hashlib.sha256(board.encode()).hexdigest(), 16) % PARTS == 0
        if held_out == (split == "test"):
            found.setdefault(board, number)
        if len(found) == count:
            return [Lake(f"{split}-{seed}-{n}", one) for n, one in enumerate(found.values())]
    raise ValueError(f"got count={count}, expected at most {len(found)} lakes of {split!r}")
