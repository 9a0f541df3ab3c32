"""The engine's time is shared between clients, by turns.

A step that decodes a hundred rows of one client would make another's single row wait for all of
them, token by token. So while clients ask for very different amounts, those that ask for less than
the average are *light*: their rows have turns of their own. The *heavy* ones' rows are computed a
part at a time, for half as long in all: light clients wait for each token, and need little.

Where a step takes about as long however many rows it has, as on a GPU, all rows share every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from typing import Literal

from langchain_art_server.backends.embedded.token_sampler import SequenceState

#: Seconds for which a client that has no call now may come back: between two of its calls, others'
#: turns stay short.
_RECENT = 0.5
#: Below so many tokens of heavy clients, or so many times those of the light ones, all rows share a
#: step: much of its time is that of loading the weights.
_FEW, _TIMES = 8, 2
#: So many times as long as heavy clients' turns are those of light ones, if they need it.
_LIGHT_TIMES = 2
_TURN_ROWS = 32  # rows of heavy clients that are decoded in one turn
#: Tokens of a prompt that take as long as a decoded one, and what a client's queue counts as.
_PREFILLED, _QUEUE = 4, 16

TurnOf = Literal["all", "light", "heavy"]


class ClientShares:
    """Fair order of clients. The clock is in seconds, monotonic.

    If a step's time is not `linear`, that is does not grow with its tokens, there are no turns.
    """

    def __init__(self, clock: Callable[[], float], *, linear: bool) -> None:
        self._clock, self._linear, self._began = clock, linear, clock()
        self._seen: dict[str, float] = {}
        self._turn: TurnOf = "all"
        self._credit = 0.0
        self.several = False  # whether others wait for this turn
        self.light: Set[str] = set[str]()  # the clients whose rows have turns of their own
        self.computed = False  # set by the caller if something was computed in this turn

    @property
    def shared(self) -> bool:
        """True if several clients have asked lately."""
        return len(self._seen) > 1

    def begin(self, rows: list[SequenceState], waiting: Set[str]) -> TurnOf:
        """End the last turn and begin one, for these rows and for clients with calls that wait."""
        self.end()
        now = self._began = self._clock()
        present = waiting | {row.client for row in rows}
        # The server's own calls, of which a new version's check is one, share a step with all.
        self._seen.update(dict.fromkeys(present - {""}, now))
        if self.shared:
            self._seen = {one: at for one, at in self._seen.items() if now - at <= _RECENT}
        self.several = self._linear and self.shared
        self.light = self._light(rows, waiting) if self.several else set()
        if not self.light:
            self._turn, self._credit = "all", 0.0
        elif self._credit >= 0 and not self.light.isdisjoint(present):
            self._turn = "light"
        else:
            self._turn = "heavy"
        return self._turn

    def _light(self, rows: list[SequenceState], waiting: Set[str]) -> Set[str]:
        """Clients who ask for less than the average; none, if all ask for about as much."""
        tokens = Counter(dict.fromkeys(waiting, _QUEUE))
        for row in rows:
            tokens[row.client] += max(1, (row.length - row.filled) // _PREFILLED)
        average = tokens.total() / len(self._seen)
        light = {client for client in self._seen if tokens[client] < average}
        asked = sum(tokens[client] for client in light)
        return light if tokens.total() - asked >= max(_FEW, _TIMES * asked) else set[str]()

    def pass_on(self) -> TurnOf:
        """The others' turn instead: these have nothing that can be computed."""
        self._turn = "heavy" if self._turn == "light" else "light"
        return self._turn

    def end(self) -> None:
        """Count the time of a turn."""
        if not self.computed:
            return
        took = self._clock() - self._began
        if self._turn == "light":
            self._credit = max(self._credit, 0.0) - took
        elif self._turn == "heavy":
            self._credit = min(self._credit, 0.0) + took * _LIGHT_TIMES
        self.computed = False


class HeavyTurns:
    """Share of heavy clients in passes: a prefill pass and a part of their rows, by turns."""

    def __init__(self) -> None:
        self.prefilled = False  # whether the last one was a prefill pass
        self._next = 0

    def only_tokens(self) -> bool:
        """Begin a turn; returns whether it is one for tokens, if any can be decoded."""
        last, self.prefilled = self.prefilled, False
        return last

    def span(self, border: int) -> tuple[int, int]:
        """The next of the rows before `border`, to be decoded in this turn."""
        first = self._next if _TURN_ROWS < border > self._next else 0
        self._next = min(first + _TURN_ROWS, border)
        return first, self._next
