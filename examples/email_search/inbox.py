"""A synthetic inbox in SQLite FTS5, and questions about it with known answers.

Every scenario has an inbox of its own: twelve mails, one of which holds the date asked for. The
others are made to be mistaken for it: same project and another event, same event and another
project, and at times a second mail about the very event whose date is another matter. Held-out
questions use (project, event) pairs that occur nowhere in training, neither in a question nor in a
mail.
"""

from __future__ import annotations

import random
import re
import sqlite3
import string
import threading
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from examples.support.mail_words import MONTHS, SENDERS, Pair, Split, split_pairs

QUESTIONS = (
    'When is "{project} {event}"?',
    'What is the date of "{project} {event}"?',
    'On which day is "{project} {event}"?',
)
FIXED = "{project} {event} is on {date}."
MOVED = "{project} {event} moves from {old} to {date}."
ERRANDS = ("photos", "budget", "menu", "tickets")
ERRAND = "{project} {event} {errand} by {date}."

MAILS_PER_INBOX = 12
MAX_HITS = 4
_IDS_PER_INBOX = 100
_FIRST_ID = 40  # above every day of a month, so that no id can be taken for a day


@dataclass(frozen=True)
class Mail:
    """One mail. `id` is a number from 40 to 99, unique within its inbox."""

    id: int
    sender: str
    subject: str
    body: str


@dataclass(frozen=True)
class Scenario:
    """One question about one inbox.

    Example:
        >>> Scenario(
        ...     id="test-3",
        ...     question='When is "Falcon audit"?',
        ...     answer="14 March",
        ...     inbox=515,
        ...     split="test",
        ...     project="Falcon",
        ...     event="audit",
        ... ).answer
        '14 March'
    """

    id: str
    question: str
    answer: str
    inbox: int
    split: Split
    project: str
    event: str

    def is_answer(self, text: str) -> bool:
        """Whether a text is the answer; case, outer punctuation and spacing do not matter."""
        return _normalised(text) == _normalised(self.answer)


def _normalised(text: str) -> str:
    return " ".join(text.casefold().strip(string.punctuation + string.whitespace).split())


def _date(rng: random.Random, other_than: str = "") -> str:
    while (date := f"{rng.randint(1, 28)} {rng.choice(MONTHS)}") == other_than:
        pass
    return date


def _announcement(rng: random.Random, pair: Pair) -> tuple[str, str, str]:
    """Subject, body and date of a mail that says when the event of `pair` is."""
    project, event = pair
    date = _date(rng)
    if rng.random() < 0.5:
        body = FIXED.format(project=project, event=event, date=date)
    else:
        body = MOVED.format(project=project, event=event, date=date, old=_date(rng, date))
    return f"{project} {event}", body, date


def _errand(rng: random.Random, pair: Pair, not_on: str) -> tuple[str, str]:
    """Subject and body of a mail about `pair` whose date is not the event's."""
    project, event = pair
    errand = rng.choice(ERRANDS)
    body = ERRAND.format(errand=errand, project=project, event=event, date=_date(rng, not_on))
    return f"{project} {event} {errand}", body


def make_scenario(
    rng: random.Random, number: int, inbox: int, split: Split, pairs: list[Pair], asked: list[Pair]
) -> tuple[Scenario, list[Mail]]:
    """Draw one question and its twelve mails.

    Args:
        rng: Source of every choice.
        number: Number of the scenario within its split; becomes part of its id.
        inbox: Number of the inbox, unique in the database.
        split: "train" or "test".
        pairs: The pairs that the other mails may be about.
        asked: The pairs that the question may be about.
    """
    pair = project, event = rng.choice(asked)
    subject, body, answer = _announcement(rng, pair)
    texts = [(subject, body)]
    if rng.random() < 0.5:
        texts.append(_errand(rng, pair, answer))
    others = [other for other in pairs if other != pair]
    same_project = [other for other in others if other[0] == project]
    same_event = [other for other in others if other[1] == event]
    chosen = rng.sample(same_project, 4) + rng.sample(same_event, 4)
    unrelated = [other for other in others if other[0] != project and other[1] != event]
    chosen += rng.sample(unrelated, MAILS_PER_INBOX - len(texts) - len(chosen))
    for other in chosen:
        texts.append(
            _errand(rng, other, "") if rng.random() < 0.2 else _announcement(rng, other)[:2]
        )
    ids = rng.sample(range(_FIRST_ID, _IDS_PER_INBOX), MAILS_PER_INBOX)
    mails = [Mail(i, rng.choice(SENDERS), *text) for i, text in zip(ids, texts, strict=True)]
    question = rng.choice(QUESTIONS).format(project=project, event=event)
    return Scenario(f"{split}-{number}", question, answer, inbox, split, project, event), mails


def generate(n_train: int, n_test: int, seed: int) -> Iterator[tuple[Scenario, list[Mail]]]:
    """Yield all scenarios with their mails, training ones first; test mails are about any pair."""
    split = split_pairs()
    assert not set(split["train"]) & set(split["test"]), "train and test pairs overlap"
    everything = sorted(split["train"] + split["test"])
    for number in range(n_train):
        rng = random.Random(f"train-{seed}-{number}")
        yield make_scenario(rng, number, number, "train", split["train"], split["train"])
    for number in range(n_test):
        rng = random.Random(f"test-{seed}-{number}")
        yield make_scenario(rng, number, n_train + number, "test", everything, split["test"])


def build(path: str | Path, n_train: int = 512, n_test: int = 200, seed: int = 0) -> Path:
    """Write the database: mails in an FTS5 table, scenarios beside them.

    Args:
        path: The SQLite file; one that exists is replaced.
        n_train: Number of training scenarios.
        n_test: Number of held-out scenarios.
        seed: Same arguments and seed, same content.

    Returns:
        The path written.

    Raises:
        ValueError: If a count is negative.
    """
    if n_train < 0 or n_test < 0:
        raise ValueError(f"n_train and n_test must not be negative, got {n_train} and {n_test}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    db = sqlite3.connect(path)
    with db:
        db.execute("CREATE VIRTUAL TABLE mails USING fts5(sender UNINDEXED, subject, body)")
        db.execute(
            "CREATE TABLE scenarios"
            " (id TEXT PRIMARY KEY, question, answer, inbox INTEGER UNIQUE, split, project, event)"
        )
        for scenario, mails in generate(n_train, n_test, seed):
            db.execute("INSERT INTO scenarios VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(scenario))
            db.executemany(
                "INSERT INTO mails (rowid, sender, subject, body) VALUES (?, ?, ?, ?)",
                [
                    (scenario.inbox * _IDS_PER_INBOX + m.id, m.sender, m.subject, m.body)
                    for m in mails
                ],
            )
        db.execute("INSERT INTO mails(mails) VALUES ('optimize')")
    db.close()
    return path


class MailStore:
    """The database opened for reading; safe to share between threads and tasks."""

    def __init__(self, path: str | Path) -> None:
        """Open a file written by `build`.

        Raises:
            FileNotFoundError: If there is no such file.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no mail database at {path}; write one with inbox.build(path)")
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._lock = threading.Lock()

    def _rows(self, sql: str, *values: object) -> list[tuple]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def scenarios(self, split: Split, limit: int | None = None) -> list[Scenario]:
        """The scenarios of one split in their order, at most `limit` of them (default: all)."""
        sql = "SELECT * FROM scenarios WHERE split = ? ORDER BY inbox LIMIT ?"
        return [Scenario(*row) for row in self._rows(sql, split, -1 if limit is None else limit)]

    def inbox(self, number: int) -> Inbox:
        """The inbox of a scenario (`Scenario.inbox`)."""
        return Inbox(self, number)

    def close(self) -> None:
        """Close the database; inboxes taken from this store stop working."""
        with self._lock:
            self._db.close()


@dataclass(frozen=True)
class Inbox:
    """One inbox; its mails lie in one range of rowids, so a search touches no other inbox."""

    store: MailStore
    number: int

    def search(self, query: str) -> str:
        """Mails that contain every word of `query`, one "subject: id" per line, at most `MAX_HITS`.

        Anything may be passed: operators and quotes of FTS5 have no meaning here, case does not
        matter, and a query without words gives a hint instead of hits.
        """
        words = re.findall(r"\w+", query)
        if not words:
            return "Empty query."
        rows = self.store._rows(
            "SELECT rowid, subject FROM mails WHERE mails MATCH ?"
            " AND rowid BETWEEN ? AND ? ORDER BY rowid LIMIT ?",
            " AND ".join(f'"{word}"' for word in words),
            self.number * _IDS_PER_INBOX,
            (self.number + 1) * _IDS_PER_INBOX - 1,
            MAX_HITS,
        )
        lines = [f"{subject}: {rowid % _IDS_PER_INBOX}" for rowid, subject in rows]
        return "\n".join(lines) or "No mail found."

    def read(self, mail_id: int) -> str:
        """Sender and text of one mail, or a line that says that there is no such mail."""
        rows = []
        if 0 <= mail_id < _IDS_PER_INBOX:
            rowid = self.number * _IDS_PER_INBOX + mail_id
            rows = self.store._rows("SELECT sender, body FROM mails WHERE rowid = ?", rowid)
        return f"From: {rows[0][0]}\n{rows[0][1]}" if rows else "No such mail."
