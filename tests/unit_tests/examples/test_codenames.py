from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from examples.codenames.agent import guesser_view, spymaster_view
from examples.codenames.environment import (
    LEVELS,
    Board,
    Game,
    Split,
    boards,
    held_out_pairs,
    reward,
)
from examples.codenames.words import KIND_OF, KINDS

BOARD = Board(
    "b",
    cards=("dog", "tin", "plum", "axe", "cow", "pear", "harp", "saw"),
    own=("dog", "plum", "cow", "pear"),
    assassin="harp",
    turns=2,
    split="train",
)
CARDS = st.sampled_from([*BOARD.cards, "zebra", "fruit"])
CLUES = st.one_of(
    st.sampled_from(["clue: fruit 2", "mammal 9", "fruit", "2", "", "dog 1", "clue: a b 1", "x 0"]),
    st.builds(lambda kind, n: f"clue: {kind} {n}", st.sampled_from(sorted(KINDS)), st.integers()),
)
MOVES = st.lists(st.tuples(CLUES, st.lists(CARDS, max_size=5)), max_size=6)


def kinds_of(cards: tuple[str, ...]) -> set[str]:
    return {KIND_OF[card] for card in cards}


def test_no_word_is_of_two_kinds_or_names_one() -> None:
    words = [word for kind in KINDS.values() for word in kind]
    assert len(words) == len(set(words)) == len(KIND_OF)
    assert not set(words) & set(KINDS)
    assert all(word.isalpha() and word.islower() for word in [*words, *KINDS])


@given(st.sampled_from(sorted(LEVELS)), st.sampled_from(["train", "test"]), st.integers(0, 10**6))
def test_boards_are_as_their_level_says(level: int, split: Split, seed: int) -> None:
    (board,) = boards(split, 1, seed, level)
    asked = LEVELS[level]
    assert len(set(board.cards)) == len(board.cards) == asked.own + asked.others + 1
    assert len(board.own) == asked.own and len(board.others) == asked.others
    assert {*board.own, *board.others, board.assassin} == set(board.cards) <= set(KIND_OF)
    assert [card for card in board.cards if card in board.own] == list(board.own)
    kinds, known = kinds_of(board.own), list(KINDS)[: asked.vocabulary]
    assert len(kinds) == asked.kinds and kinds_of(board.cards) <= set(known)
    rest = (*board.others, board.assassin)
    assert sum(KIND_OF[card] in kinds for card in rest) == asked.traps
    assert len(kinds_of(rest) - kinds) <= asked.other_kinds
    pairs = {frozenset(pair) for pair in combinations(board.own, 2)}
    assert bool(pairs & held_out_pairs()) == (split == "test")
    assert boards(split, 1, seed, level) == [board]


def retold(moves: list[tuple[str, list[str]]]) -> tuple[float, int, bool]:
    """The rules once more, from the board's side: reward, turns that were played, and the end."""
    hidden, own_left, turns = set(BOARD.cards), set(BOARD.own), 0
    for clue, names in moves:
        if not own_left or turns == BOARD.turns:
            break
        turns += 1
        parts = clue.removeprefix("clue:").split()
        if len(parts) != 2 or not parts[0].isalpha() or parts[1] not in list("123456789"):
            continue
        if parts[0] in BOARD.cards:
            continue
        allowed = int(parts[1])
        for name in list(dict.fromkeys(names))[:allowed]:
            if name not in hidden:
                break
            hidden.discard(name)
            if name == BOARD.assassin:
                return 0.0, turns, True
            if name not in own_left:
                break
            own_left.discard(name)
    return 1 - len(own_left) / 4, turns, not own_left or turns == BOARD.turns


@given(MOVES)
def test_the_rules_are_those_that_were_told_twice(moves: list[tuple[str, list[str]]]) -> None:
    game = Game(BOARD)
    for clue, names in moves:
        if game.over:
            break
        game = game.hint(clue)
        if game.clue is not None:
            game = game.guess(f"guess: {' '.join(names)}")
    assert (reward(game), len(game.turns), game.over) == retold(moves)


def test_the_guesser_is_not_told_whose_cards_are() -> None:
    game = Game(BOARD).hint("fruit 2")
    assert guesser_view(game) == "board: dog tin plum axe cow pear harp saw\nclue: fruit 2"
    told = "own: dog plum cow pear\nothers: tin axe saw\nassassin: harp"
    assert spymaster_view(game) == told
