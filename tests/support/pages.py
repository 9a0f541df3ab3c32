"""The documentation's pages, taken apart into their code blocks, and run."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_art.cli.new import SKILL

REPO = Path(__file__).parents[2]
PAGES = sorted([*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md"), SKILL])
_FENCE = re.compile(r"^```([\w-]*)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, what follows it (``notest="why"``), its text."""

    page: Path
    line: int
    language: str
    options: dict[str, str]
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found[1],
            dict(re.findall(r'(\w+)="([^"]*)"', found[2])),
            found[3],
        )
        for found in _FENCE.finditer(text)
    ]


def promised(code: str) -> list[str]:
    """What the comments say that a block prints: behind a print, and on lines of their own."""
    said: list[str] = []
    for line in code.splitlines():
        found = re.fullmatch(r"print\(.*\)\s+# (.*)|# (.*)", line)
        if found is not None:
            said.append(found[1] or found[2])
    return said


def run_page(page: Path, names: dict[str, Any], printed: Callable[[], str]) -> int:
    """Execute a page's Python blocks in order in one namespace; how many there were.

    What a comment says that a line prints must be printed, but for the numbers of versions. A block
    of another language with a title is a file, and is written first.

    Args:
        page: a Markdown file.
        names: what the page takes for granted.
        printed: gives what has been printed since it was last asked.
    """
    found = blocks(page)
    for block in found:
        if block.language != "python" and "title" in block.options:
            Path(block.options["title"]).write_text(block.code)
    python = [block for block in found if block.language == "python"]
    for block in python:
        if "notest" in block.options:
            compile(block.code, block.place, "exec")
            continue
        code = ast.parse(block.code)  # where it fails, the traceback has the block's lines
        printed()
        # Without this module's __future__ imports, as in a reader's program.
        exec(compile(code, block.place, "exec", dont_inherit=True), names)
        out = _any_version(printed()).splitlines()
        for line in promised(block.code):
            assert _any_version(line) in out, (block.place, line, out)
    return len(python)


def _any_version(text: str) -> str:
    """Policies may have been trained before; version 0 alone is the base: nothing was trained."""
    return re.sub(r"@[1-9]\d*", "@N", text)
