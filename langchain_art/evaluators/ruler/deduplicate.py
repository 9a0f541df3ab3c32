"""What several runs have in common, found once: a forest of parts, and texts that come again.

Runs of one graph begin alike, part company one after the other, and often see the same tool output
later on. So runs become paths through a tree of parts (each run: the part that it follows, and its
own blocks), and a long text that still stands in several places becomes a note that is shown once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from langchain_art.evaluators.transcript import Block
from langchain_art.wire.prefixes import common_prefix_length

#: Characters that a part or a note has to save before it pays for its own tags.
_WORTH = 60
_TAG = 12


@dataclass(frozen=True)
class Part:
    """Blocks that several runs share from one point on."""

    follows: int | None
    """Index of the part before it; None: the runs begin with it."""
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Forest:
    """The runs of a group without repetitions.

    Attributes:
        parts: each before the parts that follow it.
        runs: by run, the part that it follows (None: none) and its own blocks.
        notes: texts that stand in more than one place.
    """

    parts: list[Part] = field(default_factory=list[Part])
    runs: dict[int, Part] = field(default_factory=dict[int, Part])
    notes: list[Block] = field(default_factory=list[Block])

    @property
    def blocks(self) -> list[Block]:
        """All that has to be shown, each text once."""
        known = {note.text for note in self.notes}
        places = [*self.parts, *self.runs.values()]
        rest = [block for part in places for block in part.blocks if block.text not in known]
        return [*self.notes, *rest]


def forest(transcripts: Sequence[tuple[Block, ...]]) -> Forest:
    """Finds what `transcripts` share; `Forest.runs` is by their index."""
    found = Forest()
    _split(found, transcripts, list(range(len(transcripts))), 0, None)
    places = [*found.parts, *found.runs.values()]
    counts = Counter(block.text for part in places for block in part.blocks)
    noted: dict[str, Block] = {}
    for part in places:
        for block in part.blocks:
            saved = (counts[block.text] - 1) * (len(block.text) - _TAG) - _TAG
            if counts[block.text] > 1 and saved > _WORTH:
                known = noted.get(block.text)
                # An output in one place and a message in another: what must not be cut decides.
                is_output = block.is_output and (known is None or known.is_output)
                noted[block.text] = Block("note", block.text, is_output)
    found.notes.extend(noted.values())
    return found


def _split(
    found: Forest,
    transcripts: Sequence[tuple[Block, ...]],
    runs: list[int],
    depth: int,
    follows: int | None,
) -> None:
    """Puts `runs`, which are alike up to `depth`, under the part `follows`, and so on downwards."""
    pending = [(runs, depth, follows)]
    while pending:
        runs, depth, follows = pending.pop()
        first = transcripts[runs[0]]
        alike = [common_prefix_length(first[depth:], transcripts[run][depth:]) for run in runs[1:]]
        end = depth + min(alike, default=0)
        shared = first[depth:end]
        saved = (len(runs) - 1) * sum(len(block.text) + _TAG for block in shared)
        if len(runs) == 1 or (shared and saved - len(runs) * _TAG <= _WORTH):
            found.runs.update({run: Part(follows, transcripts[run][depth:]) for run in runs})
            continue
        if shared:
            found.parts.append(Part(follows, shared))
            follows = len(found.parts) - 1
        by_next: dict[Block | None, list[int]] = {}
        for run in runs:
            later = transcripts[run][end:]
            by_next.setdefault(later[0] if later else None, []).append(run)
        pending.extend((some, end, follows) for some in reversed(by_next.values()))
