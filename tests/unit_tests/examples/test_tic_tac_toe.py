from collections import Counter
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from examples.tic_tac_toe import environment as game


def reachable() -> set[str]:
    """Every board of every game, by playing all moves."""
    found, open_boards = {game.EMPTY}, [game.EMPTY]
    for board in open_boards:  # grows while it is read
        if not game.is_over(board):
            after = [game.play(board, square) for square in game.free(board)]
            open_boards += [one for one in after if one not in found]
            found.update(after)
    return found


BOARDS = sorted(reachable())


def three_in_a_row(board: str, mark: str) -> bool:
    """By coordinates, without the table of lines."""
    at = {divmod(square, 3) for square in range(9) if board[square] == mark}
    straight = [{(row, column) for column in range(3)} for row in range(3)]
    straight += [{(row, column) for row in range(3)} for column in range(3)]
    straight += [{(one, one) for one in range(3)}, {(one, 2 - one) for one in range(3)}]
    return any(line <= at for line in straight)


def test_the_boards_are_those_of_the_game() -> None:
    assert len(BOARDS) == 5478  # known of the game
    over = [board for board in BOARDS if game.is_over(board)]
    assert Counter(game.winner(board) for board in over) == {"X": 626, "O": 316, None: 16}
    for board in BOARDS:
        assert board.count("X") - board.count("O") in (0, 1)
        for mark in ("X", "O"):
            assert (game.winner(board) == mark) == three_in_a_row(board, mark)


@cache
def brute_force(board: str) -> int:
    """What the one to move can force (1 won, 0 drawn, -1 lost), by trying all moves."""
    mark, found = game.to_move(board), []
    for square in game.free(board):
        after = game.play(board, square)
        if three_in_a_row(after, mark):
            found.append(1)
        else:
            found.append(-brute_force(after) if game.free(after) else 0)
    return max(found)


def test_minimax_agrees_with_brute_force() -> None:
    for board in BOARDS:
        if game.is_over(board):
            continue
        sign = 1 if game.to_move(board) == "X" else -1
        assert sign * game.value(board) == brute_force(board), board
    assert game.value(game.EMPTY) == 0


@given(st.sampled_from([board for board in BOARDS if not game.is_over(board)]))
def test_the_text_says_what_is_free_and_what_ends_the_game(board: str) -> None:
    *rows, last = game.describe(board).split("\n")
    cells = " ".join(rows).split()
    assert len(cells) == 9
    assert [game.SQUARES.index(cell) for cell in cells if cell not in "XO"] == game.free(board)
    mine, _, theirs = last.partition("You win at ")[2].partition(". ")
    for said, mark in ((mine, game.to_move(board)), (theirs[:-1].partition(" at ")[2], None)):
        mark = mark or game.other(game.to_move(board))
        wins = {
            game.SQUARES[square]
            for square in game.free(board)
            if three_in_a_row(board[:square] + mark + board[square + 1 :], mark)
        }
        assert set(said.split()) - {"none"} == wins
