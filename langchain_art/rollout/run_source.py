"""Sources of `GroupStream`'s runs: this process, or workers elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from langchain_art.errors import RolloutFailed
from langchain_art.wire import Trajectory


class RunSource(ABC):
    """Makes runs of scenarios, and counts those that failed.

    Args:
        max_failed: fraction of the expected runs that may fail.
    """

    concurrency: int
    """Most runs at once."""

    def __init__(self, max_failed: float) -> None:
        self._max_failed = max_failed
        self._failed = 0
        self._allowed_failures = 0.0
        self.retried = 0
        """Runs repeated because the server, or their worker, was unavailable."""
        self.first_error: str | None = None
        """Error of the first failed run since the latest `expect`."""

    @abstractmethod
    async def run(self, scenario: Any, name: str) -> Trajectory:
        """One run of one scenario. Raises RolloutFailed."""

    @abstractmethod
    async def close(self) -> None:
        """Stop what still runs."""

    def expect(self, runs: int) -> None:
        """Count failures anew, as a fraction of this many runs."""
        self._failed, self.first_error = 0, None
        self._allowed_failures = self._max_failed * runs

    def count_failure(self, words: str, name: str, cause: BaseException | None = None) -> None:
        """Count a failed run of scenario `name`. Raises RolloutFailed if there are too many."""
        self._failed += 1
        self.first_error = self.first_error or f"{words} (scenario {name!r})"
        if self._failed > self._allowed_failures:
            raise RolloutFailed(
                f"{self._failed} rollouts raised, at most {self._allowed_failures:g} may "
                f"(max_failed). The first: {self.first_error}. Run the rollout on this one "
                "scenario to see the traceback."
            ) from cause
