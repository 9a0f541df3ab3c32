import json
from collections import deque

import pytest

from examples.frozen_lake.agent import move_schema
from examples.frozen_lake.environment import MAX_MOVES, Walk, lakes
from examples.frozen_lake.train import solved

OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


def way(walk: Walk, seed: int, end: str) -> list[str]:
    """The shortest way to a square with this sign that passes no hole."""
    board = walk.board.replace(" ", "").splitlines()
    squares = {(r, c): board[r][c] for r in range(4) for c in range(4)}
    start = next(square for square, sign in squares.items() if sign == "P")
    steps = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
    todo = deque([(start, list[str]())])
    seen = {start}
    while todo:
        (row, column), moves = todo.popleft()
        if squares[row, column] == end:
            return moves
        if squares[row, column] == "H":
            continue
        for move, (by, to) in steps.items():
            if (there := (row + by, column + to)) in squares and there not in seen:
                seen.add(there)
                todo.append((there, [*moves, move]))
    raise AssertionError(f"no way to {end} on the lake of seed {seed}")


def test_a_solved_lake_is_a_shortest_way_to_the_goal() -> None:
    for lake in lakes("train", 24):
        walk, messages = Walk(lake.seed), solved(lake)
        assert len(messages) == 2 * len(way(walk, lake.seed, "G"))
        for shown, answer in zip(messages[::2], messages[1::2], strict=True):
            assert shown.content == walk.view
            walk.go(json.loads(answer.text)["move"])
        assert walk.over and walk.reward == 1


def test_parts_share_no_lake_and_a_seed_gives_the_same_ones() -> None:
    train, held_out = lakes("train", 120), lakes("test", 96)
    boards = [Walk(lake.seed).board for lake in (*train, *held_out)]
    assert len(set(boards)) == 216
    assert lakes("train", 120) == train != lakes("train", 120, seed=1)
    assert {board.index("P") for board in boards} == {0, 6, 24, 30}, "each corner"
    other = {Walk(lake.seed).board for lake in lakes("test", 96, seed=1)}
    assert not other & set(boards[:120]), "the division does not depend on the seed"


def test_the_view_says_what_lies_ahead_and_where_the_goal_is() -> None:
    walk = Walk(5)
    lines = ["up: ice", "right: hole", "The goal is 3 up and 3 right."]
    assert walk.view.splitlines() == [*walk.board.splitlines(), "", *lines]
    for move in way(walk, 5, "G")[:-1]:
        walk.go(move)
    [line] = [line for line in walk.view.splitlines() if line.endswith(": goal")]
    assert line.partition(":")[0] in walk.view.splitlines()[-1]


@pytest.mark.parametrize("seed", range(3))
def test_the_goal_is_worth_1_and_a_hole_the_distance_from_the_start(seed: int) -> None:
    walk = Walk(seed)
    home = walk.board
    moves = way(walk, seed, "G")
    for number, move in enumerate(moves):
        assert not walk.over and move in walk.moves, (number, walk.board)
        walk.go(move)
    assert walk.over and walk.reward == 1
    walk = Walk(seed)
    assert walk.board == home
    moves = way(walk, seed, "H")
    for move in moves:
        walk.go(move)
    assert walk.over and walk.reward == pytest.approx(len(moves) / 6)


def test_a_walk_ends_after_its_moves() -> None:
    walk = Walk(0)
    there = way(walk, 0, "G")[0]
    for number in range(MAX_MOVES):
        assert not walk.over
        walk.go(there if number % 2 == 0 else OPPOSITE[there])
    assert walk.over and walk.reward == 0


def test_open_moves_are_those_that_do_not_leave_the_lake() -> None:
    walk = Walk(0)
    assert len(walk.moves) == 2
    for move in way(walk, 0, "G")[:-1]:
        walk.go(move)
        assert OPPOSITE[move] in walk.moves
    assert move_schema(walk.moves)["properties"]["move"]["enum"] == list(walk.moves)
