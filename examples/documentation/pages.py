"""The documentation of Python's standard library, read from its source, and questions about it.

Every machine that runs this has it. A page is a function or method that has a parameter with a
default: its name, its parameters and its docstring. A question tells what a function does and asks
for the default of one parameter, so that its answer is on one page and can be checked.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
import sqlite3
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

#: Not documentation of a library, or gone from newer Pythons.
_LEFT_OUT = {
    "antigravity", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "test", "this", "tkinter", "turtle", "turtledemo",
}  # fmt: skip
#: Pages that a search finds at most.
HITS = 3
#: Characters of a page, of what a hit shows of it, and of an answer.
_PAGE, _HIT, _ANSWER = 200, 56, 12
#: Words of what a function does, for a question about it.
_WORDS = range(4, 19)
#: Most questions that have the same answer.
_ALIKE = 60
#: Words that are not searched for.
_COMMON = {
    "and", "are", "can", "for", "from", "given", "has", "have", "into", "its", "not", "one",
    "returns", "that", "the", "them", "then", "this", "those", "used", "which", "with",
}  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A function's documentation.

    Attributes:
        name: With its module: ``textwrap.wrap``.
        parameters: As they are declared: ``text, width=70, **kwargs``.
        about: The docstring.
        defaults: Of the parameters that have one that can be asked for.
    """

    name: str
    parameters: str
    about: str
    defaults: dict[str, str] = field(hash=False)

    @property
    def sentence(self) -> str:
        """What the function does, in the docstring's first sentence, without its full stop."""
        return re.split(r"\.(?:\s|$)", " ".join(self.about.split()), maxsplit=1)[0]

    @property
    def hit(self) -> str:
        """The page among others."""
        return f"{self.name}: {self.sentence[:_HIT]}"

    def __str__(self) -> str:
        """The whole of it."""
        return f"{self.name}({self.parameters})\n{' '.join(self.about.split())}"[:_PAGE]


@dataclass(frozen=True)
class Question:
    """What somebody asks: the default of a parameter of the function that does something.

    Attributes:
        id: Of the scenario.
        does: What the function does.
        parameter: Its name.
        page: Name of the page that has the answer.
        answer: As the page has it.
    """

    id: str
    does: str
    parameter: str
    page: str
    answer: str


@lru_cache(maxsize=1)
def pages() -> dict[str, Page]:
    """All pages, by name. The source is parsed, not imported: nothing of it runs."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, Page] = {}
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        for file in [root / f"{name}.py", *sorted((root / name).rglob("*.py"))]:
            parts = list(file.relative_to(root).with_suffix("").parts)
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if file.is_file() and not any(part.startswith(("_", "test")) for part in parts):
                tree = ast.parse(file.read_text(encoding="utf-8"))
                found |= {page.name: page for page in _documented(".".join(parts), tree)}
    return found


def _documented(name: str, tree: ast.Module | ast.ClassDef) -> Iterator[Page]:
    for node in tree.body:
        if not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from _documented(f"{name}.{node.name}", node) if "." not in name else ()
        elif (about := ast.get_docstring(node)) and (defaults := dict(_defaults(node.args))):
            yield Page(f"{name}.{node.name}", ast.unparse(node.args), about, defaults)


def _defaults(given: ast.arguments) -> Iterator[tuple[str, str]]:
    """The parameters whose default is a number, a word, a truth value or None."""
    named = [*given.posonlyargs, *given.args]
    values = [*[None] * (len(named) - len(given.defaults)), *given.defaults, *given.kw_defaults]
    for parameter, value in zip([*named, *given.kwonlyargs], values, strict=True):
        if isinstance(value, ast.Constant | ast.UnaryOp):
            shown = ast.unparse(value).strip("'")
            if re.fullmatch(r"[\w.+-]+", shown):
                yield parameter.arg, shown


def questions(split: Literal["train", "test"], seed: int = 0) -> list[Question]:
    """All of one part, in an order drawn by the seed.

    Pages of a module are of one part, by the hash of its name: a third of the modules is held out.
    """
    part = [asked for asked in _questions() if _held_out(asked.page) == (split == "test")]
    random.Random(f"{split}:{seed}").shuffle(part)
    return part


@lru_cache(maxsize=1)
def _questions() -> list[Question]:
    told = Counter(page.sentence.casefold() for page in pages().values())
    found = [
        Question(f"{page.name}-{parameter}", page.sentence, parameter, page.name, answer)
        for page in pages().values()
        for parameter, answer in page.defaults.items()
        if len(page.sentence.split()) in _WORDS
        and told[page.sentence.casefold()] == 1
        and len(words(page.sentence)) > 2
        and len(answer) <= _ANSWER
        and len(set(page.defaults.values())) > 1  # there is something to choose
        and f"{parameter}={answer}" in str(page).replace("'", "")
    ]
    # By hash: one more page in a newer Python leaves most of the choice as it was.
    found.sort(key=lambda question: _hash(question.id))
    so_far: Counter[str] = Counter()
    kept: list[Question] = []
    for question in found:
        so_far[question.answer] += 1
        if so_far[question.answer] <= _ALIKE:
            kept.append(question)
    return kept


def _held_out(page: str) -> bool:
    return _hash(page.partition(".")[0]) % 3 == 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def words(text: str) -> list[str]:
    """Words that can be searched for, each once."""
    found = re.findall(r"[a-z0-9]{3,}", text.lower())
    return [word for word in dict.fromkeys(found) if word not in _COMMON]


class Index:
    """All pages, to be searched by words of their names and first sentences."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.execute("CREATE VIRTUAL TABLE pages USING fts5(name, sentence, tokenize=porter)")
        rows = [(page.name, page.sentence) for page in pages().values()]
        self._db.executemany("INSERT INTO pages VALUES (?, ?)", rows)

    def counts(self, words: list[str]) -> dict[str, int]:
        """Number of pages that have each word, the rarest word first."""
        told = "SELECT count(*) FROM pages WHERE pages MATCH ?"
        found = {word: self._db.execute(told, (f'"{word}"',)).fetchone()[0] for word in words}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def search(self, word: str) -> list[Page]:
        """At most `HITS` pages that have the word, the shortest first."""
        rows = self._db.execute(
            "SELECT name FROM pages WHERE pages MATCH ? ORDER BY rank LIMIT ?", (f'"{word}"', HITS)
        )
        return [pages()[name] for (name,) in rows]
