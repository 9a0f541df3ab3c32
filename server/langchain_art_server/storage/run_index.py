"""Index by which the page finds runs: a row a run, its marks, the words of its messages.

All of it follows from the trajectories and is written in the transaction that writes them, so a
list needs no body of a run, and none is behind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from pydantic_core import to_json

from langchain_art.wire import Message, Trajectory
from langchain_art.wire.trajectories import EVALUATION
from langchain_art_server.storage.queries import select_among
from langchain_art_server.storage.seals import Blob, insert
from langchain_art_server.storage.tables import (
    HELD_OUT_SCENARIOS,
    NUMBER,
    TRAJECTORIES,
    sealed_table,
)

#: What a list shows of each run, and what it is sorted by. `number` is the trajectory's.
RUN_FACTS = sealed_table(
    "run_facts",
    sa.Column("number", NUMBER, primary_key=True, autoincrement=False),
    sa.Column("id", sa.String(128), unique=True, nullable=False),
    sa.Column("group_id", sa.String(128), index=True),
    sa.Column("scenario", sa.String(256), index=True),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("reward", sa.Float),  # `Trajectory.total_return`
    sa.Column("calls", sa.Integer, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),  # sampled
    sa.Column("seconds", sa.Float),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("body", Blob, nullable=False),
    kind="summary of trajectory",
)
#: The kind of the mark of an evaluation's runs.
HELD_OUT = "held_out"
#: Names that a run has, by kind: ``policy``, ``version`` and ``node`` of its calls, and ``score``
#: with a value; and `HELD_OUT`, the versions that an evaluation ran it for, with its total return.
#: They choose runs; none is shown.
RUN_MARKS = sealed_table(
    "run_marks",
    sa.Column("kind", sa.String(8), primary_key=True),
    sa.Column("name", sa.String(256), primary_key=True),
    sa.Column("number", NUMBER, primary_key=True, autoincrement=False, index=True),
    sa.Column("value", sa.Float),
    kind="mark of a run",
    named_by=("kind", "name"),
)
sa.Index(
    "ix_run_marks_value",
    *(RUN_MARKS.c[name] for name in ("kind", "name", "value", "number")),
    sqlite_where=RUN_MARKS.c.value.is_not(None),
    postgresql_where=RUN_MARKS.c.value.is_not(None),
)
for _sorted in ("reward", "calls", "tokens", "seconds", "status"):
    sa.Index(f"ix_run_facts_{_sorted}", RUN_FACTS.c[_sorted], RUN_FACTS.c.number)

#: Most words of one run that are kept, their longest, and characters that are read for them.
MAX_WORDS, MAX_WORD, MAX_TEXT = 2048, 48, 1 << 18
#: Characters of a message that a list shows; of the name of a mark.
_EXCERPT, _MAX_NAME = 240, 256
_WORD, _ASKED = re.compile(r"[^\W_]+"), re.compile(r"([^\W_]+)(\*?)")


def words_of(text: str) -> dict[str, None]:
    """The distinct words of a text, in lower case and in their order."""
    found = _WORD.findall(text[:MAX_TEXT].lower().replace("\0", " "))
    return dict.fromkeys(word[:MAX_WORD] for word in found)


def create_text_index(connection: sa.Connection) -> None:
    """Create the table of words, in the form that each database searches quickly.

    SQLite: FTS5 (https://www.sqlite.org/fts5.html), whose tokenizer ``ascii`` splits the words,
    which `words_of` found, at nothing but spaces. PostgreSQL: a ``tsvector`` with a GIN index.
    """
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(
            "CREATE VIRTUAL TABLE run_words USING fts5("
            "words, detail=none, columnsize=0, tokenize='ascii')"
        )
        return
    connection.exec_driver_sql(
        "CREATE TABLE run_words (number BIGINT PRIMARY KEY, words TSVECTOR NOT NULL)"
    )
    connection.exec_driver_sql("CREATE INDEX ix_run_words ON run_words USING GIN (words)")


def having_words(text: str, dialect: str) -> sa.Select[int] | None:
    """The numbers of runs with all words of `text`; None if it has none.

    A word with a ``*`` behind it stands for all that begin so.
    """
    asked = [(word[:MAX_WORD], star) for word, star in _ASKED.findall(text.lower())]
    if not asked:
        return None
    if dialect == "sqlite":
        match = " AND ".join(f'"{word}"{star}' for word, star in asked)
        found = sa.text("SELECT rowid AS number FROM run_words WHERE run_words MATCH :asked")
    else:
        match = " & ".join(f"'{word}'{':*' if star else ''}" for word, star in asked)
        found = sa.text("SELECT number FROM run_words WHERE words @@ CAST(:asked AS tsquery)")
    number = sa.column("number", NUMBER)
    return sa.select(found.bindparams(asked=match).columns(number).subquery().c.number)


def of_graphs(ids: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """True of all runs but the halves of corrections' pairs (`jobs.review_plan`).

    They are stored for their job: a copy of a call that is listed, and what a person wrote.
    """
    return ~sa.or_(ids.like("call:" + "_" * 32), ids.like("correction:" + "_" * 32))


@dataclass(frozen=True)
class RunIndex:
    """Index entry of one run: made before the transaction, which other writes wait for."""

    id: str
    facts: dict[str, Any]
    marks: list[dict[str, Any]]
    words: str

    @classmethod
    def of(cls, run: Trajectory) -> RunIndex:
        """The index of a run as it is now."""
        return cls(run.id, _facts(run), list(_marks(run)), " ".join(_words(run)))


def write_index(connection: sa.Connection, found: Iterable[RunIndex]) -> None:
    """Write what runs are found by, which are stored already; what was written before is gone."""
    by_id = {one.id: one for one in found}
    names = ("number", "id", "group_id", "created_at")
    query = sa.select(*(TRAJECTORIES.c[name] for name in names))
    stored = [
        dict(zip(names, row, strict=True))
        for row in select_among(connection, query, TRAJECTORIES.c.id, by_id)
    ]
    forget_runs(connection, by_id)
    insert(connection, RUN_FACTS, [{**by_id[row["id"]].facts, **row} for row in stored])
    insert(
        connection,
        RUN_MARKS,
        [mark | {"number": row["number"]} for row in stored for mark in by_id[row["id"]].marks],
    )
    if connection.dialect.name == "sqlite":
        statement = sa.text("INSERT INTO run_words (rowid, words) VALUES (:number, :words)")
    else:
        statement = sa.text(
            "INSERT INTO run_words (number, words) "
            "VALUES (:number, array_to_tsvector(string_to_array(:words, ' ')))"
        )
    evaluated = {
        one.facts["scenario"]
        for one in by_id.values()
        if any(mark["kind"] == HELD_OUT for mark in one.marks)
    }
    column = HELD_OUT_SCENARIOS.c.scenario
    known = select_among(connection, sa.select(column), column, evaluated - {None})
    new = evaluated - {None} - {row.scenario for row in known}
    insert(connection, HELD_OUT_SCENARIOS, [{"scenario": one} for one in sorted(new)])
    if texts := [{"number": row["number"], "words": by_id[row["id"]].words} for row in stored]:
        connection.execute(statement, texts)


def forget_runs(connection: sa.Connection, ids: Iterable[str]) -> None:
    """Delete what runs are found by."""
    query = sa.select(RUN_FACTS.c.number)
    numbers = [row.number for row in select_among(connection, query, RUN_FACTS.c.id, ids)]
    key = "rowid" if connection.dialect.name == "sqlite" else "number"
    for number in numbers:
        connection.execute(sa.delete(RUN_MARKS).where(RUN_MARKS.c.number == number))
        connection.execute(sa.delete(RUN_FACTS).where(RUN_FACTS.c.number == number))
        gone = sa.text(f"DELETE FROM run_words WHERE {key} = :number")
        connection.execute(gone, {"number": number})


def _facts(run: Trajectory) -> dict[str, Any]:
    begun = [turn.started_at for turn in run.turns if turn.started_at is not None]
    ended = [
        turn.started_at + (turn.latency or 0.0) for turn in run.turns if turn.started_at is not None
    ]
    asked = next((m for t in run.turns for m in t.messages if m.get("role") == "user"), None)
    said = next((t.reply for t in reversed(run.turns) if t.reply), None)
    return {
        "scenario": run.scenario,
        "status": run.status,
        "reward": run.total_return,
        "calls": len(run.turns),
        "tokens": sum(turn.usage.completion_tokens for turn in run.turns if turn.usage),
        "seconds": max(ended) - min(begun) if begun else None,
        "body": to_json(
            {
                "versions": sorted({t.model for t in run.turns if t.model}),
                "nodes": list(dict.fromkeys(t.node for t in run.turns if t.node)),
                "scores": run.scores,
                "asked": text_of(asked)[:_EXCERPT] if asked else _plain(run.input)[:_EXCERPT],
                "said": text_of(said)[:_EXCERPT] if said else _plain(run.output)[:_EXCERPT],
                "error": run.error[:_EXCERPT] if run.error else None,
            }
        ),
    }


def _marks(run: Trajectory) -> Iterator[dict[str, Any]]:
    served = {turn.model for turn in run.turns if turn.model and turn.ours}
    names = {
        "policy": {model.partition("@")[0] for model in served},
        "version": served,
        "node": {turn.node for turn in run.turns if turn.node},
    }
    for kind, some in names.items():
        for name in sorted({one[:_MAX_NAME].replace("\0", "") for one in some}):
            yield {"kind": kind, "name": name, "value": None}
    scores = {name[:_MAX_NAME].replace("\0", ""): value for name, value in run.scores.items()}
    for name, value in sorted(scores.items()):
        yield {"kind": "score", "name": name, "value": value}
    if isinstance(versions := run.metadata.get(EVALUATION), str) and versions:
        name = versions[:_MAX_NAME].replace("\0", "")
        yield {"kind": HELD_OUT, "name": name, "value": run.total_return}


def _words(run: Trajectory) -> list[str]:
    """The words that a run is found by: of its scenario, input, messages, replies and error."""
    found: dict[str, None] = {}
    read = 0
    for text in _texts(run):
        found |= words_of(text)
        read += len(text)
        if len(found) >= MAX_WORDS or read >= MAX_TEXT:
            break
    return list(found)[:MAX_WORDS]


def _texts(run: Trajectory) -> Iterator[str]:
    yield run.scenario or ""
    yield run.error or ""
    yield _plain(run.input)
    yield _plain(run.output)
    for turn in run.turns:
        for message in (*turn.messages, *([turn.reply] if turn.reply else [])):
            if message.get("role") != "system":  # the same in all runs
                yield text_of(message)


def text_of(message: Message) -> str:
    """Text of a message, and the names and arguments of its tool calls."""
    content: Any = message.get("content")
    parts = [_plain(part) for part in (content if isinstance(content, list) else [content])]
    if calls := message.get("tool_calls"):
        parts.append(_plain(calls))
    return "\n".join(part for part in parts if part)


def _plain(value: Any) -> str:
    """A value as text: itself, a text part's text, or JSON."""
    if value is None:
        return ""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    return value if isinstance(value, str) else to_json(value).decode()
