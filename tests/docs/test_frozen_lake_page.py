"""docs/examples/frozen-lake.md says what players without a model get on held-out lakes."""

import random
import statistics

from examples.frozen_lake.environment import Walk, lakes
from tests.support.live_server import REPO

WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def moves(walk: Walk, player: str) -> list[str]:
    """Those that a player draws from."""
    if player.startswith("any move that"):
        return list(walk.moves)
    signs = walk.board.replace(" ", "").replace("\n", "")
    at, goal = divmod(signs.index("P"), 4), divmod(signs.index("G"), 4)
    nearer: dict[str, str] = {}
    for move in walk.moves:
        row, column = (here + by for here, by in zip(at, WAYS[move], strict=True))
        if abs(row - goal[0]) + abs(column - goal[1]) < abs(at[0] - goal[0]) + abs(at[1] - goal[1]):
            nearer[move] = signs[4 * row + column]
    safe = [move for move, sign in nearer.items() if sign != "H"]
    return safe if safe and player.startswith("the same") else list(nearer)


PAGE = (REPO / "docs/examples/frozen-lake.md").read_text()
ROWS = PAGE.partition("| player |")[2].partition("\n\n")[0].splitlines()[2:]


def test_what_players_without_a_model_get() -> None:
    assert len(ROWS) == 3
    for line in ROWS:
        player, mean, reached = (cell.strip() for cell in line.strip("|").split("|"))
        rewards: list[float] = []
        for number, lake in enumerate(lakes("test", 300)):
            walk, drawn = Walk(lake.seed), random.Random(number)
            while not walk.over:
                walk.go(drawn.choice(moves(walk, player)))
            rewards.append(walk.reward)
        assert f"{statistics.fmean(rewards):.2f}" == mean, player
        assert f"{statistics.fmean(reward == 1 for reward in rewards):.2f}" == reached, player
