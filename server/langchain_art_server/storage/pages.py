"""Lists by page: bounded in items and in bytes, so that no list is larger than memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from langchain_art.errors import InvalidRequest

T = TypeVar("T")
R = TypeVar("R")
#: A page ends before the item that would make it larger; its first item may be larger by itself.
MAX_PAGE_BYTES = 8 << 20
#: The most items of one.
MAX_PAGE = 1000


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some of a list, and whether more follow."""

    items: list[T]
    last_id: str | None
    """The cursor: the next page begins after the item of this id."""
    has_more: bool


def take_page(rows: Iterable[R], limit: int, read: Callable[[R], tuple[str, T, int]]) -> Page[T]:
    """A page of the first rows; `read` gives a row's id, its item and the item's bytes."""
    items: list[T] = []
    last, size = None, 0
    for row in rows:
        if len(items) == limit:
            return Page(items, last, True)
        name, item, more = read(row)
        size += more
        if items and size > MAX_PAGE_BYTES:
            return Page(items, last, True)
        items.append(item)
        last = name
    return Page(items, last, False)


def no_such_cursor(after: str) -> InvalidRequest:
    """The refusal of a cursor whose item is not, or no longer, stored."""
    return InvalidRequest(
        f"got after={after!r}, expected the last_id of a page; if it was deleted meanwhile, begin "
        "again without `after`",
        param="after",
    )
