"""An actor with a place of its own on the cluster, which it gets back elsewhere if a node is lost.

Ray restarts the actor (``max_restarts=-1``), and never a call (``max_task_retries=0``): what was
done and what was not is known to leases and to the server's database, not to Ray.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from langchain_art.errors import ArtError, EngineUnavailable
from langchain_art.ray.cluster import shortage

log = logging.getLogger(__name__)
#: Seconds within which an actor says that it is there, or is looked for again.
_ANSWER_SECONDS = 2.0
#: Seconds between two looks for room.
_PAUSE = 0.5
#: Seconds between two lines in the log that say what is missing.
_SAY_EVERY = 10.0


class NoRoom(EngineUnavailable):
    """The cluster has no room for an actor, or the actor does not answer. Says what is missing."""


class Seat:
    """One actor on a placement group of one bundle.

    Blocks: for threads. No method waits longer than it is told to.

    Args:
        what: what it is, for messages: ``Replica 1``.
        actor: its class, which the nodes import by its path.
        needs: what it takes of one node, in Ray's resources: ``{"CPU": 1, "GPU": 1}``.
        arguments: of `actor`.
    """

    def __init__(self, what: str, actor: type, needs: Mapping[str, float], *arguments: Any) -> None:
        self.what, self.needs = what, {name: n for name, n in needs.items() if n}
        self._class, self._arguments, self._closed = actor, arguments, False
        #: Why it has no place now, in words for anyone to read; None: it has one, or may have.
        self.problem: str | None = None
        self._said = float("-inf")
        self._open()

    def wait(self, seconds: float) -> None:
        """Return when the actor is there. Raises NoRoom after so many seconds, or when closed."""
        deadline = time.monotonic() + seconds
        while not self._closed:
            left = deadline - time.monotonic()
            try:
                there = self._actor.__ray_ready__.remote()
                ray.get(there, timeout=max(0.05, min(_ANSWER_SECONDS, left)))
            except (GetTimeoutError, ActorUnavailableError):
                self._look()
            except RayActorError as error:  # Ray has given it up
                log.warning("%s ended on the cluster and is made again: %s", self.what, error)
                self._reopen()
            else:
                self.problem = None
                return
            if left <= 0:
                why = self.problem or f"{self.what} is started on the cluster and does not answer"
                raise NoRoom(f"{why}.", retry_after=5)
            time.sleep(_PAUSE)
        raise NoRoom(f"{self.what} was closed.")

    def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """What a method of the actor returns. It is called once.

        Raises:
            ArtError: what the method raised.
            NoRoom: the actor is not there, or does not answer within so many seconds.
        """
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=seconds)
        except RayTaskError as error:
            if isinstance(error.cause, ArtError):
                raise error.cause from None
            raise
        except (RayActorError, GetTimeoutError) as error:
            why = f"{self.what} was lost, or did nothing for {seconds:g} s, in {method}"
            raise NoRoom(f"{why} ({type(error).__name__}).", retry_after=5) from error

    def close(self) -> None:
        """End the actor and give its place back."""
        self._closed = True
        self._remove()

    def _remove(self) -> None:
        ray.kill(cast(Any, self._actor))  # its type lacks what a handle is
        remove_placement_group(self._group)

    def _reopen(self) -> None:
        self._remove()
        self._open()

    def _open(self) -> None:
        # The least used node; one group of all would be lost as a whole (see `_look`).
        self._group = placement_group([self.needs], strategy="SPREAD")
        given = dict(self.needs)
        self._actor = (
            ray.remote(self._class)
            .options(
                num_cpus=given.pop("CPU", 0),
                num_gpus=given.pop("GPU", 0),
                resources=given,
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
            )
            .remote(*self._arguments)
        )

    def _look(self) -> None:
        """Note what is missing. A place that was lost, and has no other, is asked for anew."""
        found = placement_group_table(self._group)
        if found["state"] == "CREATED":
            self.problem = None
            return
        if found["state"] != "PENDING":
            # Ray 2.60 looks for another node for such a group without a pause, on a whole core of
            # the head's; for a new one it makes pauses of up to a second.
            self._reopen()
        self.problem = f"{self.what} waits for room on the Ray cluster: {shortage(self.needs)}"
        if time.monotonic() - self._said > _SAY_EVERY:
            self._said = time.monotonic()
            log.warning("%s.", self.problem)
