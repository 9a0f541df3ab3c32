"""`Forks`: which decisions of a graph are branched, and what may be run again for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langchain_art.errors import ConfigError
from langchain_art.wire.identifiers import Wire

#: Most continuations of one node.
_MOST = 64


@dataclass(frozen=True)
class Forks:
    """Which decisions of a graph are branched: `Trainer(forks=)`.

    After each run that has ended, each node of `at` is run again from the checkpoint before it, and
    what follows it, `continuations` times: on the same thread of the user's checkpointer, addressed
    by ``checkpoint_id``, one after the other. Of several visits of a node that called a model, one
    is drawn, by the run's ``rng``. Nodes before it are not run again. Nothing that nodes do
    outside of the graph's state (a store, a file, a request) is copied or undone.

    Example::

        Forks(at=("choose",), continuations=3, run_again=("search", "answer"))

    Args:
        at: nodes of the graph itself (not of a subgraph in it), which call a model.
        continuations: of each of them, beside the run itself.
        run_again: further nodes that may be run several times from the same state, with all that is
            in them: tools, subgraphs. Those of `at` may be, too.

    Raises:
        ConfigError: no names, a text in place of names, or a number out of range.
    """

    at: tuple[str, ...]
    continuations: int = 2
    run_again: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("at", "run_again"):
            given: Any = getattr(self, name)
            names: list[Any] = [] if isinstance(given, str) else list(given)
            if isinstance(given, str) or not all(isinstance(one, str) and one for one in names):
                raise ConfigError(f'got {name}={given!r:.200}, expected names such as ("choose",)')
            object.__setattr__(self, name, tuple(dict.fromkeys(names)))
        if not self.at:
            raise ConfigError("got at=(), expected the nodes whose decision is branched")
        if type(self.continuations) is not int or not 1 <= self.continuations <= _MOST:
            raise ConfigError(f"got {self.continuations=}, expected a number from 1 to {_MOST}")

    @property
    def runs(self) -> int:
        """Of one run with its continuations, at most."""
        return 1 + len(self.at) * self.continuations

    @property
    def settings(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "at": list(self.at),
            "continuations": self.continuations,
            "run_again": list(self.run_again),
        }


class ForkOf(Wire):
    """What a continuation's `Trajectory.metadata` has under ``fork``."""

    of: str
    """Id of the run that it continues."""
    node: str
    """Whose decision it takes anew."""
    turns: int
    """So many turns of that run, from the first, were made before."""


#: Key of `Trajectory.metadata` of a continuation: a `ForkOf`.
FORK = "fork"
