"""Truncates long texts until all of them fit a budget.

A text over its cap is cut into lines (long lines into pieces of 160 characters, of 40 if not all
are ASCII). Kept are its first piece; for up to six tenths of the cap, the pieces that share the
rarest words with the runs' final answers, which the judge has to check; then the last piece, and
pieces from the beginning. They keep their order, and each gap says how many characters are cut.

Tool outputs always have a cap. If all texts together are over the budget, the cap of tool outputs
is halved down to 40 tokens, and then a cap for all texts likewise, from 800.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from langchain_art.errors import JudgeError
from langchain_art.evaluators.transcript import Block

_PIECE = 160
_TAG = 5  # tokens around a text
LEAST = 40
"""Tokens that any text may keep: the longest piece."""
_WORD = re.compile(r"\w{3,}|\d+")


@dataclass(frozen=True)
class Caps:
    """Most tokens of a tool's output, and of any other text; None: no cap."""

    outputs: int
    texts: int | None = None

    def of(self, block: Block) -> int | None:
        """The cap of a block's text."""
        if not block.is_output:
            return self.texts
        return self.outputs if self.texts is None else min(self.outputs, self.texts)


def tokens(text: str) -> int:
    """Estimated tokens of a text: a quarter of its bytes, for any tokenizer."""
    return (len(text.encode("utf-8", "replace")) + 3) // 4


def words(text: str) -> set[str]:
    """The distinctive words of a text: three letters or more, or digits."""
    return {word.lower() for word in _WORD.findall(text)}


def fitting(blocks: Sequence[Block], outputs: int, budget: int) -> Caps:
    """The largest caps under which `blocks` have at most `budget` tokens together.

    `outputs` is the initial cap of tool outputs. Raises JudgeError if the lowest caps do not do.
    """
    sizes = [(tokens(block.text), block) for block in blocks]
    size = 0
    for caps in _levels(outputs):
        size = sum(_TAG + min(n, caps.of(block) or n) for n, block in sizes)
        if size <= budget:
            return caps
    raise JudgeError(
        f"the group's {len(blocks)} messages come to about {size} tokens with every one cut to "
        f"{LEAST}, expected at most {budget}; raise `budget`, or judge smaller groups"
    )


def shortened(block: Block, caps: Caps, wanted: set[str]) -> list[str | int]:
    """A block's text within its cap: kept texts, and between them the number of cut characters.

    `wanted` are the words of the runs' answers.
    """
    cap = caps.of(block)
    if cap is None or tokens(block.text) <= cap:
        return [block.text]
    pieces = list(_pieces(block.text))
    kept = _chosen(pieces, cap, wanted)
    parts: list[str | int] = []
    for stays, some in groupby(range(len(pieces)), key=lambda number: number in kept):
        text = "".join(pieces[number] for number in some)
        parts.append(text if stays else len(text))
    return parts


def _levels(outputs: int) -> Iterator[Caps]:
    cap = outputs
    while cap > LEAST:
        yield Caps(cap)
        cap //= 2
    for texts in (None, 800, 400, 200, 100, 50, LEAST):
        yield Caps(min(outputs, LEAST), texts)


def _pieces(text: str) -> Iterator[str]:
    width = _PIECE if text.isascii() else _PIECE // 4  # so that a piece is 40 tokens at most
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), width):
            yield line[start : start + width]


def _chosen(pieces: Sequence[str], cap: int, wanted: set[str]) -> set[int]:
    """Numbers of the pieces to keep, of about `cap` tokens."""
    found = [words(piece) & wanted for piece in pieces]
    frequency = Counter(word for one in found for word in one)
    weights = [sum(1 / frequency[word] for word in one) for one in found]
    telling = sorted((n for n, one in enumerate(found) if one), key=lambda n: -weights[n])
    kept = {0}
    spent = tokens(pieces[0])
    for numbers, limit in ((telling, 0.6 * cap), ([len(pieces) - 1, *range(len(pieces))], cap)):
        for number in numbers:
            cost = tokens(pieces[number])
            if number not in kept and spent + cost <= limit:
                kept.add(number)
                spent += cost
    return kept
