"""Deduplicates the runs of a group, so that a judge reads each text once.

Runs of one graph share prefixes, and often have equal tool outputs later. The runs become paths in
a tree of shared prefixes (each run: the part that it follows, and its own blocks), and a long text
that still occurs several times becomes a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from langchain_art.evaluators.transcript import Block
from langchain_art.wire.turn_links import common_prefix_length

#: Characters that a shared part or a note must save, and the length of a tag.
_WORTH = 60
_TAG = 12


@dataclass(frozen=True)
class SharedPart:
    """Blocks that several runs share."""

    follows: int | None  # index of the part before it; None: it is a prefix of the runs
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class DeduplicatedRuns:
    """The runs of a group without repetitions."""

    #: Each before the parts that follow it.
    parts: list[SharedPart] = field(default_factory=list[SharedPart])
    #: By run, the part that it follows (None: none) and its own blocks.
    runs: dict[int, SharedPart] = field(default_factory=dict[int, SharedPart])
    #: Long texts that occur more than once.
    notes: list[Block] = field(default_factory=list[Block])

    @property
    def unfolded(self) -> list[Block]:
        """All blocks of the parts and the runs."""
        return [block for part in (*self.parts, *self.runs.values()) for block in part.blocks]

    @property
    def blocks(self) -> list[Block]:
        """All blocks to show, each text once."""
        known = {note.text for note in self.notes}
        return [*self.notes, *(block for block in self.unfolded if block.text not in known)]


def deduplicate(transcripts: Sequence[tuple[Block, ...]]) -> DeduplicatedRuns:
    """Deduplicate `transcripts`; the result's `runs` are by their index."""
    found = DeduplicatedRuns()
    _share_prefixes(found, transcripts)
    counts = Counter(block.text for block in found.unfolded)
    # If one of the texts is no tool output, the note must not be cut as one.
    others = {block.text for block in found.unfolded if not block.is_output}
    found.notes.extend(
        Block("note", text, is_output=text not in others)
        for text, count in counts.items()
        if count > 1 and (count - 1) * (len(text) - _TAG) - _TAG > _WORTH
    )
    return found


def _share_prefixes(found: DeduplicatedRuns, transcripts: Sequence[tuple[Block, ...]]) -> None:
    """Fill in the shared prefixes as parts, and the runs."""
    # Runs that are equal up to a depth, that depth, and the part that they follow.
    pending: list[tuple[list[int], int, int | None]] = [(list(range(len(transcripts))), 0, None)]
    while pending:
        runs, depth, follows = pending.pop()
        first = transcripts[runs[0]]
        alike = [common_prefix_length(first[depth:], transcripts[run][depth:]) for run in runs[1:]]
        end = depth + min(alike, default=0)
        shared = first[depth:end]
        saved = (len(runs) - 1) * sum(len(block.text) + _TAG for block in shared)
        if len(runs) == 1 or (shared and saved - len(runs) * _TAG <= _WORTH):
            found.runs.update({run: SharedPart(follows, transcripts[run][depth:]) for run in runs})
            continue
        if shared:
            found.parts.append(SharedPart(follows, shared))
            follows = len(found.parts) - 1
        by_next: dict[Block | None, list[int]] = {}
        for run in runs:
            later = transcripts[run][end:]
            by_next.setdefault(later[0] if later else None, []).append(run)
        pending.extend((some, end, follows) for some in reversed(by_next.values()))
