import re

from hypothesis import given
from hypothesis import strategies as st

from examples.twenty_forty_eight import environment as e
from examples.twenty_forty_eight.agent import read_move

BOARDS = st.lists(st.sampled_from([0, 0, 2, 2, 4, 8, 16]), min_size=9, max_size=9).map(tuple)
STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


def naive_slide(board: e.Board, move: str) -> tuple[e.Board, int]:
    """Tile by tile, as the rules are told: each goes as far as it can, and merges at most once."""
    down, right = STEPS[move]
    tiles = {divmod(at, 3): tile for at, tile in enumerate(board) if tile}
    fixed: set[tuple[int, int]] = set()
    points = 0
    for place in sorted(tiles, key=lambda at: -(at[0] * down + at[1] * right)):
        tile, at = tiles.pop(place), place
        while True:
            after = (at[0] + down, at[1] + right)
            if not (0 <= after[0] < 3 and 0 <= after[1] < 3):
                break
            if after in tiles:
                if tiles[after] == tile and after not in fixed:
                    at, tile = after, 2 * tile
                    fixed.add(at)
                    points += tile
                break
            at = after
        tiles[at] = tile
    return tuple(tiles.get(divmod(at, 3), 0) for at in range(9)), points


@given(BOARDS, st.sampled_from(e.MOVES))
def test_a_move_is_that_of_the_naive_twin(board: e.Board, move: str) -> None:
    after, points = e.slide(board, move)
    assert (after, points) == naive_slide(board, move)
    assert sum(after) == sum(board)
    assert (move in e.legal_moves(board)) == (after != board)


@given(st.integers(0, 10**6), st.lists(st.sampled_from([*e.MOVES, None]), max_size=40))
def test_a_game_follows_the_rules(seed: int, moves: list[str | None]) -> None:
    game, twin = e.Game(str(seed)), e.Game(str(seed))
    assert sorted(tile for tile in game.board if tile) in ([2, 2], [2, 4], [4, 4])
    for move in moves:
        if game.is_over:
            break
        before, made = game.board, game.made
        game.play(move)
        assert game.made == made + 1
        after = e.slide(before, move)[0] if move else before
        new = [at for at in range(9) if game.board[at] != after[at]]
        made = naive_slide(before, move)[1] if move else 0
        assert game.gains[-1] == (None if after == before else made)
        if after == before:
            assert not new
        else:
            assert len(new) == 1 and after[new[0]] == 0 and game.board[new[0]] in (2, 4)
        twin.play(move)
        assert twin.board == game.board, "the same moves make the same game"
    assert 0 <= e.reward(game) <= 1
    assert game.illegal <= game.made == len(game.gains) <= e.MAX_MOVES


@given(BOARDS)
def test_the_text_shows_the_board_and_what_each_move_does(board: e.Board) -> None:
    text = e.describe(board).split("\n")
    shown = [0 if cell == "." else int(cell) for row in text[:3] for cell in row.split()]
    assert tuple(shown) == board
    for line in text[3:]:
        move, said = re.fullmatch(r"(\w+): (?:\+?)(\w+)", line).groups()  # type: ignore[union-attr]
        after, points = naive_slide(board, move)
        assert said == ("nothing" if after == board else str(points))


def test_the_ends_of_a_game() -> None:
    assert e.Game("", (e.TARGET, *[0] * 8)).is_over
    assert e.Game("", (2, 4, 2, 4, 2, 4, 2, 4, 2)).is_over, "no move changes it"
    assert e.Game("", (2, 2, *[0] * 7), made=e.MAX_MOVES).is_over
    assert not e.Game("", (2, 2, *[0] * 7)).is_over
    assert e.reward(e.Game("", (e.TARGET, *[0] * 8))) == 1.0
    assert e.reward(e.Game("", (e.TARGET // 2, 2, *[0] * 7))) == 0.5
    assert [read_move(text) for text in ("up", "I go Left.", "no", "")] == [
        "up",
        "left",
        None,
        None,
    ]


def test_what_single_moves_are_worth() -> None:
    game = e.Game("", (2, 0, 4, *[0] * 6), target=32)
    game.play("right")
    assert e.move_rewards(game) == [0.0], "it slides and merges nothing"
    game = e.Game("", (2, 2, 4, *[0] * 6), target=32)
    for move in ("left", "sideways", None):
        game.play(move)
    assert game.gains == [4, None, None] and game.illegal == 2
    assert e.move_rewards(game) == [0.125, -e.PENALTY, -e.PENALTY]
