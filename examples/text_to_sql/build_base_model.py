"""Build the small base model that the example trains.

Run `python -m examples.text_to_sql.build_base_model`. It imitates the calls of a random policy
(`demonstrations`): SQL that is well formed, verdicts and rewrites drawn by lot.

Calls of a random policy: queries are well formed, what they ask for is drawn by lot.

The warm start learns the language from these: SQL for this schema, a verdict, another query. Each
choice (function, columns, comparison, verdict) leans to what the words say and is otherwise left to
chance, so reinforcement has choices to make at every node.
"""

from __future__ import annotations

import itertools
import random
import re
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from examples.support.tiny_model import Conversation, Recipe, main
from examples.support.warm_start import WarmStart
from examples.text_to_sql.agent import (
    CHECK,
    MAX_REWRITES,
    REWRITE,
    RIGHT,
    WRITE,
    WRONG,
    attempt,
    task,
)
from examples.text_to_sql.environment import (
    COMPARISONS,
    COUNT,
    MEASURES,
    NUMBERS,
    SELECT,
    TABLES,
    TEXTS,
    Databases,
    Scenario,
)

Message = dict[str, str]
#: How often the random policy takes a choice that the question's words suggest.
LEAN = 0.65
EMPTY = ("NULL", "0", "no rows")


def random_query(rng: random.Random, scenario: Scenario, former: str = "") -> str:
    """A well-formed query about one of the schema's tables, drawn by lot.

    After a former query it leans to a column of texts that the former one did not use.
    """
    tables = {
        line.split("(")[0]: line[line.index("(") + 1 : -1].split(", ")
        for line in scenario.schema.splitlines()
    }
    asked, words = scenario.question.removesuffix("?").split(" with ")
    named = next(name for name in tables if asked.split()[-1] == name)
    table = named if rng.random() < 0.95 else rng.choice(list(tables))
    numbers, texts = tables[table][:2], tables[table][2:]
    suggested = COUNT if asked.startswith(COUNT) else asked.split()[0]
    word = suggested if rng.random() < LEAN else rng.choice([COUNT, *MEASURES])
    what = "COUNT(*)" if word == COUNT else f"{MEASURES[word]}({_column(rng, asked, numbers)})"
    found = re.fullmatch(r"(\w+) (above|below) (\d+)", words)
    if found:
        leans = rng.random() < LEAN
        sign = COMPARISONS[found[2]] if leans else rng.choice(list(COMPARISONS.values()))
        where = f"{_column(rng, words, numbers)} {sign} {found[3]}"
    else:
        unused = [column for column in texts if f" {column} " not in former]
        where = f"{rng.choice(unused if unused and rng.random() < LEAN else texts)} = '{words}'"
    return SELECT.format(what=what, table=table, where=where)


def _column(rng: random.Random, words: str, columns: list[str]) -> str:
    named = [column for column in columns if column in words.split()]
    return named[0] if named and rng.random() < LEAN else rng.choice(columns)


def play(rng: random.Random, scenario: Scenario, databases: Databases) -> Iterator[list[Message]]:
    """Play one scenario and yield each call of the model as a conversation of its own."""
    database = databases.of(scenario)
    query = random_query(rng, scenario)
    yield _call(WRITE, task(scenario.schema, scenario.question), query)
    for _ in range(MAX_REWRITES):
        result = str(database.run(query))
        shown = attempt(scenario.question, query, result)
        doubtful = result in EMPTY or result.startswith("error")
        approved = rng.random() < (0.2 if doubtful else 0.6)
        yield _call(CHECK, shown, RIGHT if approved else WRONG)
        if approved:
            break
        query = random_query(rng, scenario, query)
        yield _call(REWRITE, f"{scenario.schema}\n{shown}", query)


def _call(system: str, asked: str, said: str) -> list[Message]:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": said},
    ]


def demonstrations(seed: int, folder: Path) -> Iterator[list[Message]]:
    """Yield calls of training scenarios without end; the same for the same seed."""
    databases = Databases(folder)
    for number in itertools.count():
        for scenario in databases.build(100, 0, seed + number)["train"]:
            rng = random.Random(f"demo-{seed}-{number}-{scenario.id}")
            yield from play(rng, scenario, databases)


SHIPPED = Path(__file__).parent / "base_model"
# No database of the example is built with this seed.
SEED = 1234


def conversations(count: int) -> list[Conversation]:
    """The first `count` calls of a random policy on training scenarios."""
    with tempfile.TemporaryDirectory() as folder:
        calls = islice(demonstrations(SEED, Path(folder)), count)
        return [Conversation(call) for call in calls]


def words() -> list[str]:
    """Names and values as they stand in schemas, questions and queries."""
    columns = [*NUMBERS, *(column for pair in TEXTS for column in pair)]
    values = [value for domain in TEXTS.values() for value in domain]
    names = [*TABLES, *(f" {name}" for name in (*TABLES, *columns, *values))]
    names += [f"({name}" for name in NUMBERS]
    names += [*values, *MEASURES, " above", " below", " right", " wrong"]
    names += [f" {function}" for function in (*MEASURES.values(), "COUNT")]
    return [*names, *(str(number) for number in range(10, 100))]


RECIPE = Recipe(
    conversations=conversations,
    count=12_000,
    words=words(),
    vocab_size=640,
    plan=WarmStart(steps=600, copy_steps=150),
)

if __name__ == "__main__":
    main(RECIPE, SHIPPED)
