"""Seeds of a run's calls and of its own random choices, all derived from one key.

A run with a key samples the same tokens again, whatever runs beside it. A call's seed is the first
63 bits of SHA-256 over the run's key, the names of the nodes around the call and its messages
without the ids in them (as JSON), and the number of such calls in the run before it. So the order
in which parallel branches call does not count unless they ask the same, a call that is asked again
draws anew, and one that failed and is made again gets the seed that it had.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

from pydantic_core import from_json, to_json

#: Fields of messages that are drawn anew in each run.
_IDS = frozenset({"id", "tool_call_id"})


class RunSeed:
    """The seeds of one run.

    Args:
        parts: the run's key, such as the fit's seed, the scenario's place and the run's number.
    """

    def __init__(self, *parts: int | str) -> None:
        self._parts = parts
        self.key = to_json(parts).decode()
        """Text from which `of` makes the same seed in another process."""
        self._process = os.getpid()
        self._used: dict[bytes, set[int]] = {}
        self._streams = 0
        self._lock = Lock()
        self.rng = random.Random(_number(self.key.encode(), b"rng"))
        """Random numbers for what the program itself draws."""

    @classmethod
    def of(cls, key: str) -> RunSeed:
        """The seed of that `key`."""
        return cls(*from_json(key))

    def copy(self) -> RunSeed:
        """The seed as it stands, for a run that may have to be made again from here."""
        made = RunSeed(*self._parts)
        made._used = {digest: set(used) for digest, used in self._used.items()}
        made._streams = self._streams
        made.rng.setstate(self.rng.getstate())
        return made

    def within(self) -> Callable[[int, int], RunSeed]:
        """The seeds of runs that this run makes, as of `GroupStream.seed`; others each time."""
        with self._lock:
            self._streams += 1
            return partial(RunSeed, *self._parts, "within", self._streams)

    @contextmanager
    def seeding(self, payload: dict[str, Any], path: Sequence[str]) -> Generator[None]:
        """Gives a request its seed, unless it has one; an error gives the seed free again.

        A cancelled call keeps it: with the same reply, a retry would take as long again. A forked
        process gets none: what other processes drew is not known there.
        """
        if payload.get("seed") is not None or os.getpid() != self._process:
            yield
            return
        about = to_json([path, without_ids(payload.get("messages"))])
        digest = hashlib.sha256(about).digest()
        with self._lock:
            used = self._used.setdefault(digest, set())
            number = next(n for n in range(len(used) + 1) if n not in used)
            used.add(number)
        payload["seed"] = _number(self.key.encode(), digest, number.to_bytes(8))
        try:
            yield
        except Exception:
            with self._lock:
                used.discard(number)
            raise


#: The seed of the run that this context runs in; None: calls are sampled without a seed.
run_seed: ContextVar[RunSeed | None] = ContextVar("langchain_art_run_seed", default=None)


def without_ids(value: object) -> object:
    """Messages without the ids in them and in their tool calls."""
    if isinstance(value, Mapping):
        return {name: without_ids(one) for name, one in value.items() if name not in _IDS}
    return [without_ids(one) for one in value] if isinstance(value, list | tuple) else value


def _number(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"\0".join(parts)).digest()[:8]) >> 1
