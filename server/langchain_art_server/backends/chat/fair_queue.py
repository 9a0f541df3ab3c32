"""Queue shared fairly between clients: the next one is of the client that has least."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Set
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue of each client. Of one client, what came first is taken first."""

    def __init__(self) -> None:
        # The client whose turn was longest ago comes first.
        self._of: OrderedDict[str, deque[T]] = OrderedDict()

    @property
    def clients(self) -> Set[str]:
        """Clients for whom something waits."""
        return self._of.keys()

    def __bool__(self) -> bool:
        return bool(self._of)

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def put(self, client: str, item: T) -> None:
        """Append to the client's queue."""
        self._of.setdefault(client, deque()).append(item)

    def put_back(self, client: str, item: T) -> None:
        """Put in front of the client's queue; it is the client's turn again."""
        self._of.setdefault(client, deque()).appendleft(item)
        self._of.move_to_end(client, last=False)

    def take(self, held: Mapping[str, int], among: Set[str] | None = None) -> T | None:
        """Take the next one of the client, `among` these, that holds least; they take turns."""
        clients: Iterable[str] = self._of if among is None else [c for c in self._of if c in among]
        client = min(clients, key=lambda one: held.get(one, 0), default=None)
        if client is None:
            return None
        items = self._of[client]
        item = items.popleft()
        if items:
            self._of.move_to_end(client)
        else:
            del self._of[client]
        return item

    def drop(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Take out what is unwanted."""
        dropped: list[T] = []
        for client, items in [*self._of.items()]:
            gone = [item for item in items if unwanted(item)]
            if len(gone) == len(items):
                del self._of[client]
            elif gone:
                self._of[client] = deque(item for item in items if not unwanted(item))
            dropped += gone
        return dropped


class FairSlots:
    """`limit` slots. The next free one is for the client that has fewest.

    One client may have all of them. Further slots, `kept`, are for others, which then need not wait
    until one of its calls ends.
    """

    def __init__(self, limit: int, kept: int = 0) -> None:
        self._limit, self._kept = limit, kept
        self._held: Counter[str] = Counter()
        self._waiting: FairQueue[tuple[str, asyncio.Future[None]]] = FairQueue()

    @property
    def held(self) -> int:
        """Slots that are given out."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Calls that wait for one."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def one(self, client: str) -> AsyncGenerator[None]:
        """A slot, when it is this client's turn."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(client, (client, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._held -= Counter([client])
            self._waiting.drop(lambda one: one[1] is granted)
            self._grant()

    def _grant(self) -> None:
        while self.held < self._limit + self._kept:
            may = {one for one in self._waiting.clients if self._held[one] < self._limit}
            if (found := self._waiting.take(self._held, may)) is None:
                return
            client, granted = found
            if not granted.cancelled():
                self._held[client] += 1
                granted.set_result(None)
