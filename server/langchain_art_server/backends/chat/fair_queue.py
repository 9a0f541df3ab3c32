"""Queue shared fairly between clients: the next one is of the client that has least."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Set
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
