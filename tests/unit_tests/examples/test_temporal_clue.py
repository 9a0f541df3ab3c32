import re
from collections.abc import Callable
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.temporal_clue.environment import (
    CATEGORIES,
    HOURS,
    Puzzle,
    Split,
    held_out_pairs,
    puzzles,
    reward,
)

Table = list[tuple[str, ...]]
Check = Callable[[Table, int], bool]
LINES = "who: {}\nwhere: {}\nwhen: {}\nwith: {}"


def value_in(text: str) -> str:
    """The only value of the puzzles that a text names."""
    (found,) = [w for w in re.findall(r"\w+", text) if any(w in column for column in CATEGORIES)]
    return found


def read(sentence: str) -> Check:
    """What a sentence says, from its English alone."""
    sentence = sentence.rstrip(".")
    if record := re.fullmatch(r"(\w+) was in the (\w+) at (\w+) with the (\w+)", sentence):
        return lambda table, thief: record.groups() in table
    if " came before " in sentence:
        first, last = map(value_in, sentence.split(" came before "))

        def earlier(table: Table, thief: int) -> bool:
            hours = [next(row[2] for row in table if value in row) for value in (first, last)]
            return HOURS.index(hours[0]) < HOURS.index(hours[1])

        return earlier
    denied = " not " in sentence
    if sentence.startswith("The thief "):
        value = value_in(sentence)
        return lambda table, thief: (value in table[thief]) != denied
    one, other = [w for w in re.findall(r"\w+", sentence) if any(w in c for c in CATEGORIES)]
    return lambda table, thief: any(one in row and other in row for row in table) != denied


def solutions(puzzle: Puzzle) -> set[tuple[frozenset[tuple[str, ...]], tuple[str, ...]]]:
    """Every table and every thief that the text allows: all are tried."""
    clues = [line for line in puzzle.text.splitlines() if not re.match(r"\w+: |No two", line)]
    assert len(clues) == len(puzzle.clues)
    checks = [read(clue) for clue in clues]
    people, *others = [list(column) for column in zip(*puzzle.world.rows, strict=True)]
    found = set()
    for columns in product(*(permutations(values) for values in others)):
        table = list(zip(people, *columns, strict=True))
        for thief in range(len(table)):
            if all(check(table, thief) for check in checks):
                found.add((frozenset(table), table[thief]))
    return found


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([1, 2]), st.sampled_from(["train", "test"]), st.integers(0, 10**6))
def test_a_text_has_one_solution_when_all_are_tried(level: int, split: Split, seed: int) -> None:
    (puzzle,) = puzzles(split, 1, seed, level)
    assert solutions(puzzle) == {(frozenset(puzzle.world.rows), puzzle.world.answer)}


def test_a_text_of_all_kinds_of_clues_has_one_solution_when_all_are_tried() -> None:
    for puzzle in puzzles("train", 2, 5, level=3):
        assert solutions(puzzle) == {(frozenset(puzzle.world.rows), puzzle.world.answer)}


@given(st.integers(0, 10**6))
def test_held_out_pairs_are_in_no_training_puzzle(seed: int) -> None:
    held_out = held_out_pairs()
    (train,), (test,) = puzzles("train", 1, seed), puzzles("test", 1, seed)
    assert not {row[:2] for row in train.world.rows} & held_out
    assert test.world.answer[:2] in held_out
    assert puzzles("test", 1, seed) == [test]


PUZZLE = puzzles("train", 1, 0)[0]
RIGHT = LINES.format(*PUZZLE.world.answer)


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        (RIGHT, 1.0),
        (RIGHT.upper(), 1.0),
        (f"It was not the cook.\nwho: nobody\n\n**{RIGHT}**".replace("\n", ".\n"), 1.0),
        (re.sub("where: ", "Where: the ", RIGHT), 1.0),
        (RIGHT.replace("when: ", "when: around "), 0.75),
        (f"{RIGHT}\nwho: nobody", 0.75),
        (RIGHT.splitlines()[2], 0.25),
        (RIGHT.replace("where: ", "where: \n"), 0.75),
        ("", 0.0),
        (LINES.format(*["x"] * 4), 0.0),
    ],
)
def test_an_answer_is_worth_the_share_that_is_right(said: str, worth: float) -> None:
    assert reward(PUZZLE, said) == worth
