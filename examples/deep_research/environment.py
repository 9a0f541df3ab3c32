"""A corpus about made-up towns in SQLite FTS5, and questions that take several searches.

A document says in one line what something is in a town, as a record or as a rumour. Each (town,
topic) has one record, which is right, and one or two rumours, which are wrong. A question asks for
two or three facts of different towns and topics. Held-out questions ask for (town, topic) pairs
that no training question asks for.
"""

from __future__ import annotations

import random
import re
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# fmt: off
TOWNS = (
    "Arlen", "Brom", "Calder", "Dunwick", "Elmset", "Farrow", "Garth", "Hollin", "Ivinghoe",
    "Kelso", "Ludlow", "Marden", "Norwell", "Otley", "Penrith", "Quorn",
)
TOPICS: Mapping[str, tuple[str, ...]] = {
    "river": ("Tay", "Wye", "Ouse", "Avon", "Dee", "Tees", "Esk", "Nene"),
    "mayor": ("Ann", "Bea", "Carl", "Dora", "Emil", "Finn", "Gus", "Hana"),
    "crop": ("barley", "hops", "flax", "oats", "rye", "beets", "kale", "leeks"),
    "craft": ("lace", "glass", "rope", "clocks", "kilns", "boots", "nails", "paper"),
    "bird": ("heron", "swift", "owl", "crane", "finch", "kite", "robin", "teal"),
    "tree": ("oak", "elm", "ash", "yew", "birch", "alder", "pine", "cedar"),
}
# fmt: on
RECORD, RUMOUR = "Record", "Rumour"
LINE = "{source}: the {topic} of {town} is {value}."
MAX_HITS = 3
HELD_OUT_SHARE = 0.2

Split = Literal["train", "test"]
Pair = tuple[str, str]
"""A town and a topic."""


@dataclass(frozen=True)
class Scenario:
    """One question, and the facts that answer it in the order in which they are asked for.

    Example:
        >>> Scenario(
        ...     id="test-0",
        ...     split="test",
        ...     question="What are the river of Arlen and the mayor of Brom?",
        ...     pairs=(("Arlen", "river"), ("Brom", "mayor")),
        ...     facts=("Tay", "Ann"),
        ... ).facts
        ('Tay', 'Ann')
    """

    id: str
    split: Split
    question: str
    pairs: tuple[Pair, ...]
    facts: tuple[str, ...]


def split_pairs() -> dict[Split, list[Pair]]:
    """Divide all (town, topic) pairs into training and held-out ones, always in the same way."""
    pairs = [(town, topic) for town in TOWNS for topic in TOPICS]
    random.Random("pairs").shuffle(pairs)
    n_test = round(len(pairs) * HELD_OUT_SHARE)
    return {"test": sorted(pairs[:n_test]), "train": sorted(pairs[n_test:])}


def ask(pairs: Sequence[Pair]) -> str:
    """The question for these facts."""
    asked = [f"the {topic} of {town}" for town, topic in pairs]
    return f"What are {', '.join(asked[:-1])} and {asked[-1]}?"


class Corpus:
    """The documents, and a full-text search over them; safe to share between threads and tasks."""

    def __init__(self, documents: Iterable[str]) -> None:
        """Index documents, each a line of text."""
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = threading.Lock()
        self._db.execute("CREATE VIRTUAL TABLE documents USING fts5(text)")
        self._db.executemany(
            "INSERT INTO documents VALUES (?)", [(document,) for document in documents]
        )

    def search(self, query: str) -> list[str]:
        """The documents that have every word of `query`, at most `MAX_HITS`, in stored order.

        Anything may be passed: operators and quotes of FTS5 have no meaning here, case does not
        matter, and a query without words finds nothing.
        """
        words = re.findall(r"\w+", query)
        if not words:
            return []
        match = " AND ".join(f'"{word}"' for word in words)
        sql = "SELECT text FROM documents WHERE documents MATCH ? ORDER BY rowid LIMIT ?"
        with self._lock:
            return [text for (text,) in self._db.execute(sql, (match, MAX_HITS))]


@dataclass(frozen=True)
class World:
    """A corpus, and what its records say."""

    corpus: Corpus
    facts: Mapping[Pair, str]
    seed: int

    def scenarios(self, split: Split, count: int) -> list[Scenario]:
        """The first `count` questions of a split; the same for the same seed."""
        rng = random.Random(f"{split}-{self.seed}")
        pairs = split_pairs()[split]
        return [self._draw(rng, f"{split}-{number}", split, pairs) for number in range(count)]

    def _draw(self, rng: random.Random, name: str, split: Split, pairs: list[Pair]) -> Scenario:
        wanted = rng.choice((2, 2, 3))
        asked: list[Pair] = []
        while len(asked) < wanted:
            town, topic = rng.choice(pairs)
            if all(town != one[0] and topic != one[1] for one in asked):
                asked.append((town, topic))
        facts = tuple(self.facts[pair] for pair in asked)
        return Scenario(name, split, ask(asked), tuple(asked), facts)


def make_world(seed: int = 0) -> World:
    """Draw a corpus: for each town and topic a record, and one or two rumours, in random order."""
    rng = random.Random(f"world-{seed}")
    facts: dict[Pair, str] = {}
    documents: list[str] = []
    for town in TOWNS:
        for topic, values in TOPICS.items():
            facts[town, topic], *others = rng.sample(values, rng.choice((2, 3)))
            lines = [(RECORD, facts[town, topic]), *((RUMOUR, other) for other in others)]
            documents += [
                LINE.format(source=source, topic=topic, town=town, value=value)
                for source, value in lines
            ]
    rng.shuffle(documents)
    return World(Corpus(documents), facts, seed)


def answers(report: str) -> list[str]:
    """The facts in a report: what stands between commas, without a last full stop."""
    return [part.strip(" .\n").casefold() for part in re.split(r",| and ", report)]


def reward(scenario: Scenario, report: str) -> float:
    """Score one run: the share of the facts that the report has, each in its place.

    A report with more parts than there are facts asked for scores 0.0.
    """
    given = answers(report)
    if len(given) > len(scenario.facts):
        return 0.0
    right = [one == fact.casefold() for one, fact in zip(given, scenario.facts, strict=False)]
    return sum(right) / len(scenario.facts)
