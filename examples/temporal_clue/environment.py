"""Puzzles about a theft: who it was, where, when and with what.

Each of several suspects was in one place, came at one hour and had one thing. A *world* is a table
of these facts, and who the thief is. A puzzle's clues are true in its world, and in no other:
`solve` enumerates the worlds in which they are.

In held-out puzzles the thief was in a place where that suspect never is in any training puzzle.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, permutations, product
from typing import Literal

# fmt: off
PEOPLE = (
    "Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivan", "June", "Karl", "Lena",
)
PLACES = (
    "kitchen", "library", "garden", "cellar", "attic", "hall", "study", "garage", "lounge",
    "stable", "chapel", "tower",
)
HOURS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve",
)
THINGS = (
    "rope", "lamp", "spoon", "ladder", "candle", "hammer", "key", "shovel", "mirror", "basket",
    "bottle", "torch",
)
# fmt: on
CATEGORIES = (PEOPLE, PLACES, HOURS, THINGS)
QUESTIONS = ("who", "where", "when", "with")
HELD_OUT_SHARE = 0.2

Split = Literal["train", "test"]
Row = tuple[str, str, str, str]
Fact = str  # a value of a category; no value is in two of them
_CATEGORY_OF = {value: at for at, values in enumerate(CATEGORIES) for value in values}
_PREDICATES = ("was {}", "was in the {}", "came at {}", "had the {}")
_DENIALS = ("was not {}", "was not in the {}", "did not come at {}", "did not have the {}")


@dataclass(frozen=True)
class World:
    """What happened: `rows` of (person, place, hour, thing), and which of them is the thief's."""

    rows: tuple[Row, ...]
    thief: int

    @property
    def row_of(self) -> dict[Fact, int]:
        """Every fact, and the row that it is in."""
        return {fact: at for at, row in enumerate(self.rows) for fact in row}

    @property
    def answer(self) -> Row:
        """Who it was, where, when, and with what."""
        return self.rows[self.thief]


Kind = Literal["record", "together", "apart", "before", "thief", "innocent"]


def _predicate(fact: Fact, forms: tuple[str, ...] = _PREDICATES) -> str:
    return forms[_CATEGORY_OF[fact]].format(fact)


def _subject(fact: Fact) -> str:
    return fact if fact in PEOPLE else f"whoever {_predicate(fact)}"


@dataclass(frozen=True)
class Clue:
    """One statement about a world.

    Attributes:
        kind: what is said of the facts: all of a row ("record"), two of one row ("together") or of
            two rows ("apart"), the first earlier than the second ("before"), of the thief's row
            ("thief") or of another ("innocent").
        facts: four, two or one, by kind.
    """

    kind: Kind
    facts: tuple[Fact, ...]

    @property
    def text(self) -> str:
        """The statement in English."""
        first, last = self.facts[0], self.facts[-1]
        if self.kind == "record":
            person, place, hour, thing = self.facts
            return f"{person} was in the {place} at {hour} with the {thing}."
        if self.kind == "before":
            said = f"{_subject(first)} came before {_subject(last)}."
        else:
            subject = "the thief" if self.kind in ("thief", "innocent") else _subject(first)
            denied = self.kind in ("apart", "innocent")
            said = f"{subject} {_predicate(last, _DENIALS if denied else _PREDICATES)}."
        return said[0].upper() + said[1:]

    def holds(self, row_of: Mapping[Fact, int], thief: int | None = None) -> bool | None:
        """Whether it is true in a world of which only some facts are known.

        Args:
            row_of: the facts that are known, and the row that each is in.
            thief: the thief's row; None if not known.

        Returns:
            None where what is known does not decide it.
        """
        if self.kind in ("thief", "innocent"):
            return (
                None
                if thief is None
                else (row_of[self.facts[0]] == thief) == (self.kind == "thief")
            )
        if any(fact not in row_of for fact in self.facts):
            return None
        rows = [row_of[fact] for fact in self.facts]
        if self.kind == "before":
            hour = {row_of[hour]: at for at, hour in enumerate(HOURS) if hour in row_of}
            return hour[rows[0]] < hour[rows[1]] if hour.keys() >= set(rows) else None
        return (len(set(rows)) == 1) == (self.kind != "apart")


@dataclass(frozen=True)
class Level:
    """How large and how hard a puzzle is.

    Attributes:
        suspects: rows of the table.
        kinds: kinds of clues. With "record" every row is told as it is; else as few clues as leave
            one possibility.
    """

    suspects: int
    kinds: tuple[Kind, ...]


LEVELS = {
    1: Level(3, ("record", "thief")),
    2: Level(3, ("together", "thief")),
    3: Level(4, ("together", "apart", "before", "thief")),
    4: Level(5, ("together", "apart", "before", "innocent")),
}


@dataclass(frozen=True)
class Puzzle:
    """One scenario: clues that are true in `world` alone."""

    id: str
    world: World
    clues: tuple[Clue, ...]
    listed: bool
    split: Split

    @property
    def text(self) -> str:
        """The case as it is told: what may be what, unless the clues tell it all, and the clues."""
        lines = [clue.text for clue in self.clues]
        if self.listed:
            values = [sorted(column, key=_order) for column in zip(*self.world.rows, strict=True)]
            names = ("Suspects", "Places", "Hours", "Things")
            told = [f"{n}: {', '.join(v)}." for n, v in zip(names, values, strict=True)]
            told.append("No two suspects share a place, an hour or a thing.")
            lines = [*told, *lines]
        return "\n".join(lines)


def _category(fact: Fact) -> int:
    return _CATEGORY_OF[fact]


def _order(value: str) -> int:
    return CATEGORIES[_CATEGORY_OF[value]].index(value)


def solve(columns: tuple[tuple[Fact, ...], ...], clues: tuple[Clue, ...]) -> Iterator[World]:
    """Enumerate the worlds in which all clues are true, by backtracking.

    One cell of the table is filled after the other, hours first, and no further once a clue about
    the new fact is false.

    Args:
        columns: the people, places, hours and things of the puzzle, as many of each.
        clues: statements about them.
    """
    people, places, hours, things = columns
    about = {fact: [c for c in clues if fact in c.facts] for column in columns for fact in column}
    row_of = {person: row for row, person in enumerate(people)}
    cells = [(column, row) for column in (hours, places, things) for row in range(len(people))]

    def fill(at: int) -> Iterator[World]:
        if at == len(cells):
            found = {
                row: sorted((f for f in row_of if row_of[f] == row), key=_category)
                for row in range(len(people))
            }
            for thief in range(len(people)):
                if all(clue.holds(row_of, thief) for clue in clues):
                    yield World(tuple((w, p, h, t) for w, p, h, t in found.values()), thief)
            return
        column, row = cells[at]
        for fact in column:
            if fact not in row_of:
                row_of[fact] = row
                if not any(clue.holds(row_of) is False for clue in about[fact]):
                    yield from fill(at + 1)
                del row_of[fact]

    yield from fill(0)


def _true_clues(world: World, kinds: tuple[Kind, ...]) -> list[Clue]:
    """Every clue of these kinds that is true in `world`, but those that say who the thief is."""
    facts = [fact for row in world.rows for fact in row]
    found = [Clue("record", row) for row in world.rows]
    for first, last in permutations(facts, 2):
        if _CATEGORY_OF[first] < _CATEGORY_OF[last]:
            found += [Clue("together", (first, last)), Clue("apart", (first, last))]
        if _CATEGORY_OF[first] != 2 != _CATEGORY_OF[last]:
            found.append(Clue("before", (first, last)))
    found += [Clue("innocent", (fact,)) for fact in facts]
    row_of = world.row_of
    return [clue for clue in found if clue.kind in kinds and clue.holds(row_of, world.thief)]


def _choose_clues(rng: random.Random, world: World, level: Level) -> tuple[Clue, ...]:
    columns = tuple(tuple(sorted(column, key=_order)) for column in zip(*world.rows, strict=True))
    candidates = _true_clues(world, level.kinds)
    rng.shuffle(candidates)
    about_thief = Clue("thief", (rng.choice(world.answer),))
    if "record" in level.kinds:
        return (*candidates, about_thief)
    chosen = [about_thief] if "thief" in level.kinds else []
    # Each clue that is taken excludes a world that the clues before it allow.
    while wrong := next((w for w in solve(columns, tuple(chosen)) if not _same(w, world)), None):
        chosen.append(next(c for c in candidates if not c.holds(wrong.row_of, wrong.thief)))
    for clue in [clue for clue in chosen if clue.kind != "thief"]:
        fewer = [other for other in chosen if other != clue]
        if len(list(islice(solve(columns, tuple(fewer)), 2))) == 1:
            chosen = fewer
    rng.shuffle(chosen)
    return tuple(sorted(chosen, key=lambda clue: clue.kind in ("thief", "innocent")))


def _same(one: World, other: World) -> bool:
    return set(one.rows) == set(other.rows) and one.answer == other.answer


def held_out_pairs() -> frozenset[tuple[str, str]]:
    """Pairs of a person and a place that are in no training puzzle; always the same."""
    pairs = list(product(PEOPLE, PLACES))
    random.Random("pairs").shuffle(pairs)
    return frozenset(pairs[: round(len(pairs) * HELD_OUT_SHARE)])


_HELD_OUT = held_out_pairs()


def make_puzzle(rng: random.Random, id: str, level: int, split: Split) -> Puzzle:
    """Draw one puzzle; `solve` finds its world and no other.

    Args:
        rng: source of every choice.
        id: of the puzzle.
        level: a key of `LEVELS`.
        split: "train": no pair of `held_out_pairs` is in it; "test": the thief's is one of them.
    """
    size = LEVELS[level].suspects
    while True:
        columns = [rng.sample(values, size) for values in CATEGORIES]
        rows: list[Row] = [(who, *rest) for who, *rest in zip(*columns, strict=True)]
        thief = rng.randrange(size)
        held_out = [row[:2] in _HELD_OUT for row in rows]
        if held_out[thief] if split == "test" else not any(held_out):
            break
    world = World(tuple(rows), thief)
    clues = _choose_clues(rng, world, LEVELS[level])
    return Puzzle(id, world, clues, "record" not in LEVELS[level].kinds, split)


def puzzles(split: Split, n: int, seed: int, level: int = 1) -> list[Puzzle]:
    """Draw `n` puzzles; the same arguments give the same puzzles.

    Raises:
        ValueError: If there is no such level.
    """
    if level not in LEVELS:
        raise ValueError(f"got level {level}, expected one of {', '.join(map(str, LEVELS))}")
    return [
        make_puzzle(random.Random(f"{split}-{level}-{seed}-{k}"), f"{split}-{k}", level, split)
        for k in range(n)
    ]


def answers(text: str) -> dict[str, str]:
    """What a reply says to each question: the last line "who: Ada" for it counts."""
    found = re.findall(
        r"^[^\w\n]*(who|where|when|with)[^\w\n]+(.*)$", text, re.IGNORECASE | re.MULTILINE
    )
    return {question.casefold(): said.strip(" .*`").casefold() for question, said in found}


def right_answers(puzzle: Puzzle, text: str) -> dict[str, bool]:
    """By question: whether a reply answers it rightly. Case and an article do not matter."""
    said = answers(text)
    return {
        question: said.get(question, "").removeprefix("the ") == value.casefold()
        for question, value in zip(QUESTIONS, puzzle.world.answer, strict=True)
    }


def reward(puzzle: Puzzle, text: str) -> float:
    """The share of the questions that a reply answers rightly, from 0 to 1."""
    right = right_answers(puzzle, text)
    return sum(right.values()) / len(right)
