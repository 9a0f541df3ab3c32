"""What becomes of a promise: it holds, it does not (`NotHeld`), or nobody can tell."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from langchain_art.errors import ArtError

#: Characters of a value that a reason shows.
_SHOWN = 1500


class NotHeld(ArtError, code="not_held"):
    """A promise was checked and found broken; the message is the reason."""


class CannotBeChecked(ArtError, code="cannot_be_checked"):
    """A promise could not be checked; the message says what is missing."""


def same(what: str, seen: Any, expected: Any) -> None:
    """Nothing if both are equal. Else raises `NotHeld` with both."""
    if seen != expected:
        raise NotHeld(f"{what}: got {_shown(seen)}, expected {_shown(expected)}")


def holds(condition: object, reason: str) -> None:
    """Nothing if the condition is true. Else raises `NotHeld` with the reason."""
    if not condition:
        raise NotHeld(reason)


@contextmanager
def leaves(kind: type[BaseException]) -> Generator[None]:
    """What is run inside must raise `kind`, which is swallowed. Else raises `NotHeld`."""
    try:
        yield
    except kind:
        return
    raise NotHeld(f"nothing was raised, expected {kind.__name__}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
