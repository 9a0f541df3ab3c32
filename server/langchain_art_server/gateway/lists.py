"""Lists in the form of OpenAI's API, and pages of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Generic, Self, TypeVar
from weakref import WeakValueDictionary

from fastapi import Query
from pydantic import BaseModel

from langchain_art import wire
from langchain_art_server.storage.queries import MAX_PAGE, Page

T = TypeVar("T")
#: Bytes of one client's pages that are read in a second: a page of 8 MiB takes a core a twentieth
#: of one, so they get a tenth of its time. And how often all requests of a client that wait for a
#: change look for it in a second.
_READ_PER_SECOND, LOOKS_PER_SECOND = 16 << 20, 200


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


class Turns(Generic[T]):
    """Reads of one client are made one after the other, and not too many in a second.

    `seconds` are those from the beginning of a read that gave this to that of the next one.
    """

    def __init__(self, seconds: Callable[[T], float]) -> None:
        self._seconds = seconds
        self._reading = WeakValueDictionary[str, asyncio.Lock]()
        #: By client: when its next read begins.
        self._free_at: dict[str, float] = {}

    async def take(self, client: str, read: Callable[[], Awaitable[T]]) -> T:
        """The result of `read`, made when it is the client's turn."""
        clock = asyncio.get_running_loop().time
        lock = self._reading.setdefault(client, asyncio.Lock())
        async with lock:
            await asyncio.sleep(self._free_at.get(client, 0.0) - clock())
            self._free_at = {one: at for one, at in self._free_at.items() if at > clock()}
            begun, found = clock(), await read()
            self._free_at[client] = begun + self._seconds(found)
            return found

    async def take_by(
        self, deadline: float, client: str, read: Callable[[], Awaitable[T]], otherwise: T
    ) -> T:
        """As `take`; `otherwise` if the read has not ended by `deadline` (`time.monotonic`)."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await self.take(client, read)
        except TimeoutError:
            return otherwise


def page_turns() -> Turns[Page[bytes]]:
    """Turns to read pages, by their bytes."""
    return Turns(lambda page: sum(map(len, page.items)) / _READ_PER_SECOND)


def look_turns() -> Turns[Any]:
    """Turns of requests that wait for a change to look for it: they cost the same, few or many."""
    return Turns(lambda _found: 1 / LOOKS_PER_SECOND)


Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
After = Annotated[wire.Id | None, Query()]
