import random
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.text_to_sql.environment import (
    Databases,
    Scenario,
    Table,
    make_scenario,
    split_combinations,
)
from examples.text_to_sql.train import figures

ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT COUNT(*) FROM r"
SCENARIO = Scenario("train-0", "train", 0, "", "", "SELECT 1", ("dogs", "*", "home"))


def by_hand(question: str, table: Table) -> int:
    """The question's answer without SQL."""
    asked, words = question.removesuffix("?").split(" with ")
    column = {name: [row[at] for row in table.rows] for at, name in enumerate(table.columns)}
    if found := re.fullmatch(r"(\w+) (above|below) (\d+)", words):
        limit = int(found[3])
        kept = [int(v) > limit if found[2] == "above" else int(v) < limit for v in column[found[1]]]
    else:
        kept = [words in row for row in table.rows]
    if asked.startswith("How many"):
        return sum(kept)
    kind, name = asked.split()[:2]
    values = [int(value) for value, keep in zip(column[name], kept, strict=True) if keep]
    return {"Highest": max, "Lowest": min, "Total": sum}[kind](values)


@given(st.integers(0, 10_000), st.sampled_from(["train", "test"]))
def test_the_gold_query_gives_what_the_question_asks_for(seed: int, split: str) -> None:
    combinations = split_combinations()[split]
    scenario, tables = make_scenario(random.Random(seed), 0, 0, split, combinations)
    [table] = [table for table in tables if f" {table.name}" in scenario.question]
    assert scenario.combination in combinations
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute(f"CREATE TABLE {table}")
        marks = ", ".join("?" * len(table.columns))
        db.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table.rows)
        assert db.execute(scenario.gold).fetchall() == [(by_hand(scenario.question, table),)]


def test_no_combination_is_on_both_sides_and_scenarios_keep_to_theirs(tmp_path: Path) -> None:
    split = split_combinations()
    assert not set(split["train"]) & set(split["test"])
    databases = Databases(tmp_path)
    scenarios = databases.build(20, 20, seed=3)
    for side in ("train", "test"):
        assert {one.combination for one in scenarios[side]} <= set(split[side])
    assert scenarios == Databases(tmp_path / "again").build(20, 20, seed=3)
    assert all(databases.right(one, one.gold) for one in scenarios["test"])
    with pytest.raises(ValueError, match="counts"):
        databases.build(-1, 0)


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("DELETE FROM dogs", "not authorized"),
        ("DROP TABLE dogs", "not authorized"),
        ("INSERT INTO dogs VALUES (1)", "not authorized"),
        ("ATTACH 'other.sqlite3' AS other", "not authorized"),
        ("PRAGMA table_info(dogs)", "not authorized"),
        ("VACUUM INTO 'copy.sqlite3'", "authorization denied"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT hex(zeroblob(100000000))", "too big"),
        ("SELECT age FROM cats", "no such table"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("SELECT '\0'", "null character"),
        (ENDLESS, "too slow"),
    ],
)
def test_nothing_but_reading_is_possible(query: str, error: str, tmp_path: Path) -> None:
    path = Databases(tmp_path)._path(0)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE dogs (age)")
    before = path.read_bytes()
    result = Databases(tmp_path).of(SCENARIO).run(query, time_limit=0.1)
    assert error in (result.error or ""), result
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_figures_of_nodes_are_there_where_they_apply() -> None:
    assert figures([True], [True]) == {"first query right": 1.0}
    assert figures([False, True], [False, True]) == {
        "first query right": 0.0,
        "wrong first query mended": 1.0,
        "checker's precision": 1.0,
        "checker's recall": 1.0,
    }
    assert figures([True, False, False], [False, False])["checker's precision"] == 0.0
    assert figures([False], [True])["checker's recall"] == 0.0
