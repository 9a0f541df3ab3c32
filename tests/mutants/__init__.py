"""Mutants: changes of one line, each of which at least one of its tests finds.

``python -m tests.mutants`` tries them. They are such as slip into a refactoring: a bound, a sign, a
shift by one, a filter that is left out.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """In `file`, `old` is replaced by `new`; one of `tests`, all of ``make test``, fails then."""

    name: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str

    def applied(self, root: Path) -> str:
        """The text of the file in the tree `root` with the mutant."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: got {count} places with its `old` text in {self.file}, expected one;"
                " adapt tests/mutants/mutants.toml to what stands there now"
            )
        return text.replace(self.old, self.new)


def all_mutants() -> list[Mutant]:
    """Those of mutants.toml, named ``ROOM: what is different``."""
    rooms = tomllib.loads((ROOT / "tests/mutants/mutants.toml").read_text())
    return [
        Mutant(f"{room}: {name}", file, tuple(tests), old, new)
        for room, mutants in rooms.items()
        for name, (file, *tests, old, new) in mutants.items()
    ]
