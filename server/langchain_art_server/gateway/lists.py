"""Lists in the form of OpenAI's API, and pages of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Generic, Self, TypeVar
from weakref import WeakValueDictionary

from fastapi import Query
from pydantic import BaseModel

from langchain_art import wire
from langchain_art_server.storage.pages import MAX_PAGE, Page

T = TypeVar("T")
#: Bytes of one client's pages that are read in a second: a page of 8 MiB takes a core a twentieth
#: of one, so they get a tenth of its time.
_READ_PER_SECOND = 16 << 20


class ListOf(BaseModel, Generic[T]):
    """A list in the form of OpenAI's API."""

    object: str = "list"
    data: list[T]


class PageOf(ListOf[T]):
    """A page of a list. The next one begins `after` the item of `last_id`.

    `damaged` has a message for each item that the disk changed: it is not in `data`.
    """

    last_id: str | None
    has_more: bool
    damaged: tuple[str, ...] = ()

    @classmethod
    def of(cls, page: Page[T]) -> Self:
        """A page that the store has read."""
        return cls(
            data=page.items, last_id=page.last_id, has_more=page.has_more, damaged=page.damaged
        )


class PageTurns:
    """The pages of one client are read one after the other, and not too many bytes in a second."""

    def __init__(self) -> None:
        self._reading = WeakValueDictionary[str, asyncio.Lock]()
        #: By client: when its next page is read.
        self._free_at: dict[str, float] = {}

    async def take(self, client: str, read: Callable[[], Awaitable[Page[bytes]]]) -> Page[bytes]:
        """The page that `read` gives, when it is the client's turn."""
        clock = asyncio.get_running_loop().time
        lock = self._reading.setdefault(client, asyncio.Lock())
        async with lock:
            await asyncio.sleep(self._free_at.get(client, 0.0) - clock())
            self._free_at = {one: at for one, at in self._free_at.items() if at > clock()}
            begun, page = clock(), await read()
            self._free_at[client] = begun + sum(map(len, page.items)) / _READ_PER_SECOND
            return page


Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
After = Annotated[wire.Id | None, Query()]
