"""Moves of slots of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator


def close_gaps(slots: list[int], start: int) -> list[int]:
    """The slots that go to ``start, start + 1, …``; those that are there already stay."""
    places = range(start, start + len(slots))
    moving = [slot for slot in slots if slot not in places]
    return [place if place in slots else moving.pop() for place in places]


def to_end(chosen: list[bool], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The swaps that bring the chosen slots of a range to its end."""
    border = stop - sum(chosen[start:stop])
    early = (slot for slot in range(start, border) if chosen[slot])
    late = (slot for slot in range(border, stop) if not chosen[slot])
    return zip(early, late, strict=True)
