"""Small generated databases in SQLite, and questions about them with a gold query.

Every scenario has a database of its own: two tables of eight rows. A question names the table, what
is asked for and a filter. A filter by text (``with Rome``) does not say which column it is meant
for: two columns of the table hold cities, and Rome stands in one of them only, which the schema
does not show. So half of such first queries find nothing, and only the result says so.

Rows are drawn until no other query of the grammar gives the gold query's result, so that a wrong
query is not right by chance. Held-out questions use (table, column, filter) combinations that no
training question uses.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# fmt: off
TABLES = ("dogs", "boats", "shops", "books", "parks", "songs", "farms", "lamps")
NUMBERS = ("age", "price", "weight", "height", "speed", "length", "rating", "stock")
TEXTS = {
    ("home", "office"): ("Rome", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Quito", "Paris"),
    ("front", "back"): ("red", "blue", "green", "white", "black", "pink", "grey", "brown"),
    ("maker", "seller"): ("Ana", "Ben", "Chloe", "David", "Elena", "Farid", "Grace", "Hugo"),
}
# fmt: on
MEASURES = {"Highest": "MAX", "Lowest": "MIN", "Total": "SUM"}
COUNT = "How many"
COMPARISONS = {"above": ">", "below": "<"}
SELECT = "SELECT {what} FROM {table} WHERE {where}"

ROWS = 8
HELD_OUT_SHARE = 0.2
TEXT_SHARE = 0.6
TIME_LIMIT = 0.5
MAX_ROWS = 5
MAX_CELL = 10_000

Split = Literal["train", "test"]
Combination = tuple[str, str, str]
"""Table, column asked for (``*``: rows are counted), and filter: a column, or ``age above``."""


@dataclass(frozen=True)
class Table:
    """A table and its rows, each with a value for every column."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[int | str, ...], ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.columns)})"


@dataclass(frozen=True)
class Scenario:
    """One question about one database.

    Example:
        >>> Scenario(
        ...     id="test-0",
        ...     split="test",
        ...     database=512,
        ...     schema="dogs(age, price, home, office)",
        ...     question="Highest age of dogs with Rome?",
        ...     gold="SELECT MAX(age) FROM dogs WHERE home = 'Rome'",
        ...     combination=("dogs", "age", "home"),
        ... ).split
        'test'
    """

    id: str
    split: Split
    database: int
    schema: str
    question: str
    gold: str
    combination: Combination


@dataclass(frozen=True)
class Result:
    """What a query gave: rows, or why it gave none. The text of it is what a model is shown."""

    rows: tuple[tuple[object, ...], ...] = ()
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"error: {self.error}"
        shown = "; ".join(", ".join(map(_cell, row)) for row in self.rows[:MAX_ROWS])
        more = f"; and {len(self.rows) - MAX_ROWS} more" if len(self.rows) > MAX_ROWS else ""
        return shown + more or "no rows"


def _cell(value: object) -> str:
    return "NULL" if value is None else str(value)[:80]


def same(one: Result, other: Result) -> bool:
    """Whether two queries gave the same rows, in whatever order; errors are like nothing else."""
    if one.error is not None or other.error is not None:
        return False
    return sorted(map(repr, one.rows)) == sorted(map(repr, other.rows))


def split_combinations() -> dict[Split, list[Combination]]:
    """Divide all combinations into training and held-out ones, always in the same way."""
    filters = [column for pair in TEXTS for column in pair]
    filters += [f"{column} {word}" for column in NUMBERS for word in COMPARISONS]
    every = [
        (table, column, where)
        for table in TABLES
        for column in ("*", *NUMBERS)
        for where in filters
        if where.split()[0] != column
    ]
    random.Random("combinations").shuffle(every)
    n_test = round(len(every) * HELD_OUT_SHARE)
    return {"test": sorted(every[:n_test]), "train": sorted(every[n_test:])}


def _draw_table(rng: random.Random, name: str, wanted: Sequence[str]) -> Table:
    """A table with two columns of numbers and two of texts, those that are `wanted` among them."""
    numbers = [column for column in NUMBERS if column in wanted]
    numbers += rng.sample([c for c in NUMBERS if c not in wanted], 2 - len(numbers))
    pairs = [pair for pair in TEXTS if set(pair) & set(wanted)] or [rng.choice(list(TEXTS))]
    rng.shuffle(numbers)
    columns = (*numbers, *pairs[0])
    return Table(name, columns, _draw_rows(rng, columns))


def _draw_rows(rng: random.Random, columns: Sequence[str]) -> tuple[tuple[int | str, ...], ...]:
    """Rows in which no two columns have a text in common."""
    numbers = [rng.sample(range(10, 100), ROWS) for _ in columns[:2]]
    values = rng.sample(TEXTS[columns[2], columns[3]], 8)
    texts = [[rng.choice(half) for _ in range(ROWS)] for half in (values[:4], values[4:])]
    return tuple(zip(*numbers, *texts, strict=True))


def _filter(rng: random.Random, table: Table, where: str) -> tuple[str, str, list[str]]:
    """The filter in words and in SQL, and all filters that the grammar has for these words."""
    column, *comparison = where.split()
    held = [row[table.columns.index(column)] for row in table.rows]
    if comparison:
        limit = sorted(int(value) for value in held)[rng.randint(2, ROWS - 3)]
        every = [f"{c} {sign} {limit}" for c in table.columns[:2] for sign in COMPARISONS.values()]
        sign = COMPARISONS[comparison[0]]
        return f"{column} {comparison[0]} {limit}", f"{column} {sign} {limit}", every
    value = str(rng.choice(held))
    every = [f"{c} = '{value}'" for c in table.columns[2:]]
    return value, f"{column} = '{value}'", every


def _draw(
    rng: random.Random, combination: Combination
) -> tuple[str, str, tuple[Table, ...], list[str]]:
    """Question, gold query, tables, and all queries of the grammar for the question's words."""
    name, column, where = combination
    wanted = [word for word in (column, where.split()[0]) if word != "*"]
    table = _draw_table(rng, name, wanted)
    other = _draw_table(rng, rng.choice([t for t in TABLES if t != name]), ())
    words, gold_filter, filters = _filter(rng, table, where)
    if column == "*":
        asked, gold_what = f"{COUNT} {name}", "COUNT(*)"
    else:
        measure = rng.choice(list(MEASURES))
        asked, gold_what = f"{measure} {column} of {name}", f"{MEASURES[measure]}({column})"
    whats = ["COUNT(*)"]
    whats += [f"{fn}({c})" for fn in MEASURES.values() for c in table.columns[:2]]
    gold = SELECT.format(what=gold_what, table=name, where=gold_filter)
    every = [SELECT.format(what=w, table=name, where=f) for w in whats for f in filters]
    tables = [table, other]
    rng.shuffle(tables)
    return f"{asked} with {words}?", gold, tuple(tables), every


def make_scenario(
    rng: random.Random, number: int, database: int, split: Split, combinations: list[Combination]
) -> tuple[Scenario, tuple[Table, ...]]:
    """Draw one question and its two tables.

    Args:
        rng: Source of every choice.
        number: Number of the scenario within its split; becomes part of its id.
        database: Number of the database, unique among all.
        split: "train" or "test".
        combinations: Those that the question may use.
    """
    by_text = rng.random() < TEXT_SHARE
    choices = [c for c in combinations if (" " not in c[2]) == by_text]
    combination = rng.choice(choices)
    while True:
        question, gold, tables, every = _draw(rng, combination)
        if _only_one_is_right(tables, gold, every):
            break
    schema = "\n".join(map(str, tables))
    named = f"{split}-{number}"
    return Scenario(named, split, database, schema, question, gold, combination), tables


def _only_one_is_right(tables: Sequence[Table], gold: str, every: Sequence[str]) -> bool:
    with closing(sqlite3.connect(":memory:")) as db:
        _write(db, tables)
        right = db.execute(gold).fetchall()
        others = (db.execute(query).fetchall() for query in every if query != gold)
        return right not in ([(None,)], [(0,)]) and all(other != right for other in others)


def _write(db: sqlite3.Connection, tables: Sequence[Table]) -> None:
    for table in tables:
        db.execute(f"CREATE TABLE {table}")
        marks = ", ".join("?" * len(table.columns))
        db.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table.rows)


def generate(n_train: int, n_test: int, seed: int) -> Iterator[tuple[Scenario, tuple[Table, ...]]]:
    """Yield all scenarios with their tables, training ones first."""
    combinations = split_combinations()
    counts: list[tuple[Split, int]] = [("train", n_train), ("test", n_test)]
    database = itertools.count()
    for split, count in counts:
        for number in range(count):
            rng = random.Random(f"{split}-{seed}-{number}")
            yield make_scenario(rng, number, next(database), split, combinations[split])


class Databases:
    """The scenarios' databases, a file each in one folder."""

    def __init__(self, folder: str | Path) -> None:
        """Keep databases in `folder`, which is made if missing."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._gold: dict[str, Result] = {}

    def build(self, n_train: int, n_test: int, seed: int = 0) -> dict[Split, list[Scenario]]:
        """Write the databases of all scenarios; the same arguments give the same content.

        Raises:
            ValueError: If a count is negative.
        """
        if n_train < 0 or n_test < 0:
            raise ValueError(f"expected counts of scenarios, got {n_train} and {n_test}")
        scenarios: dict[Split, list[Scenario]] = {"train": [], "test": []}
        for scenario, tables in generate(n_train, n_test, seed):
            path = self._path(scenario.database)
            path.unlink(missing_ok=True)
            with closing(sqlite3.connect(path)) as db:
                db.execute("PRAGMA synchronous = OFF")
                with db:
                    _write(db, tables)
            scenarios[scenario.split].append(scenario)
        return scenarios

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.sqlite3"

    def of(self, scenario: Scenario) -> Database:
        """The database of a scenario."""
        return Database(self._path(scenario.database))

    def right(self, scenario: Scenario, query: str) -> bool:
        """Whether a query gives what the scenario's gold query gives."""
        database = self.of(scenario)
        if scenario.id not in self._gold:
            self._gold[scenario.id] = database.run(scenario.gold)
        return same(database.run(query), self._gold[scenario.id])


_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}


@dataclass(frozen=True)
class Database:
    """One database, open to queries of any origin: nothing but reading is possible."""

    path: Path

    def run(self, query: str, time_limit: float = TIME_LIMIT) -> Result:
        """Run one query: on a read-only connection, SELECT only, for `time_limit` seconds at most.

        Whatever is wrong with the query is part of the result; nothing is raised for it.
        """
        until = time.monotonic() + time_limit
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as db:
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL)
            db.set_authorizer(_authorize)
            db.set_progress_handler(lambda: time.monotonic() > until, 1000)
            try:
                rows = db.execute(query).fetchmany(MAX_ROWS * 10)
            except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: a NUL
                late = time.monotonic() > until
                return Result(error="too slow" if late else str(error))
        return Result(tuple(rows))


def _authorize(
    action: int, one: str | None, two: str | None, database: str | None, trigger: str | None
) -> int:
    loads = action == sqlite3.SQLITE_FUNCTION and two == "load_extension"
    return sqlite3.SQLITE_OK if action in _ALLOWED and not loads else sqlite3.SQLITE_DENY


def reward(scenario: Scenario, databases: Databases, queries: Sequence[str]) -> float:
    """Score one run: 1.0 if its last query gives the gold query's result, else 0.0."""
    return float(bool(queries) and databases.right(scenario, queries[-1]))
