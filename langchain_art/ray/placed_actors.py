"""Actors with a place of their own on the cluster, which they get back elsewhere if it is lost.

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
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from langchain_art.errors import ArtError, ConfigError, EngineUnavailable


def connect(address: str = "auto") -> None:
    """Join the cluster at `address` (``auto``: this machine's, or RAY_ADDRESS), unless in one.

    Raises ConfigError if there is none at the address, or this machine is no node of it.
    """
    if ray.is_initialized():
        return
    try:
        # Ray's own handlers of the log would change this program's.
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"got the Ray cluster {address!r}, which cannot be joined: {str(error)[:300]} Run `ray "
            "start --head` on one machine and `ray start --address=HOST:6379` on the others, this "
            "one too; then give HOST:6379, or auto."
        ) from error


def shortage(needs: Mapping[str, float], actors: int = 1) -> str:
    """Resources that actors need (each of one node) and the cluster lacks, in words."""
    nodes = ray.nodes()
    alive: list[dict[str, float]] = [node["Resources"] for node in nodes if node["Alive"]]
    free = ray.available_resources()
    total = {name: sum(node.get(name, 0) for node in alive) for name in needs}
    most = {name: max((node.get(name, 0) for node in alive), default=0) for name in needs}
    lacking = [n for n, need in needs.items() if most[n] < need or free.get(n, 0) < actors * need]
    has = ", ".join(f"{n} {total[n]:g} ({free.get(n, 0):g} free)" for n in needs)
    lost = f" ({len(nodes) - len(alive)} lost)" if len(alive) < len(nodes) else ""
    where = "on one node" if actors == 1 else f"on one node, {actors} times"
    return (
        f"it needs {_amounts(needs)} {where}. "
        f"The cluster has {len(alive)} nodes{lost} with {has}, and at most {_amounts(most)} on "
        f"one node. Missing: {', '.join(lacking) or 'nodes that have all of it free'}"
    )


def _amounts(resources: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {amount:g}" for name, amount in resources.items())


log = logging.getLogger(__name__)
#: Seconds within which an actor says that it is there, or is looked for again.
_ANSWER_SECONDS = 2.0
#: Seconds between two looks for room.
_PAUSE = 0.5
#: Seconds between two lines in the log that say what is missing.
_SAY_EVERY = 10.0


class ActorsUnavailable(EngineUnavailable):
    """The cluster has no room for an actor, or the actor does not answer. Says what is missing."""


class PlacedActors:
    """One actor, or several of a kind, on a placement group with a bundle for each.

    Blocks: for threads. No method waits longer than its `seconds`. Each actor takes `needs` of one
    node, in Ray's resources (``{"CPU": 1, "GPU": 1}``), whose nodes import its class by its path.
    Several are on as few nodes as there is room on, and lost as a whole.
    """

    def __init__(
        self,
        what: str,
        actor: type,
        needs: Mapping[str, float],
        *arguments: Any,
        actors: int = 1,
    ) -> None:
        self.what, self.needs = what, {name: n for name, n in needs.items() if n}
        self._class, self._arguments, self._closed = actor, arguments, False
        self._count = actors
        #: Why it has no place now, in words for anyone to read; None: it has one, or may have.
        self.problem: str | None = None
        self._said = float("-inf")
        self._open()

    def wait(self, seconds: float) -> None:
        """Wait for the actors. Raises ActorsUnavailable after so many seconds, or when closed."""
        deadline = time.monotonic() + seconds
        while not self._closed:
            left = deadline - time.monotonic()
            try:
                there = [actor.__ray_ready__.remote() for actor in self._actors]
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
                raise ActorsUnavailable(f"{why}.", retry_after=5)
            time.sleep(_PAUSE)
        raise ActorsUnavailable(f"{self.what} was closed.")

    def call(self, method: str, *arguments: Any, seconds: float, actor: int = 0) -> Any:
        """Call a method of an actor once, of the first one by default; return its result.

        Raises:
            ArtError: what the method raised.
            ActorsUnavailable: the actor is not there, or does not answer within so many seconds.
        """
        try:
            asked = getattr(self._actors[actor], method).remote(*arguments)
            return ray.get(asked, timeout=seconds)
        except RayTaskError as error:
            if isinstance(error.cause, ArtError):
                raise error.cause from None
            raise
        except (RayActorError, GetTimeoutError) as error:
            why = f"{self.what} was lost, or did nothing for {seconds:g} s, in {method}"
            raise ActorsUnavailable(f"{why} ({type(error).__name__}).", retry_after=5) from error

    def close(self) -> None:
        """End the actors and give their place back."""
        self._closed = True
        self._remove()

    def _remove(self) -> None:
        for actor in self._actors:
            ray.kill(cast(Any, actor))  # its type lacks what a handle is
        remove_placement_group(self._group)

    def _reopen(self) -> None:
        self._remove()
        self._open()

    def _open(self) -> None:
        # One: on the least used node. Several: near each other, since they talk to each other.
        strategy = "SPREAD" if self._count == 1 else "PACK"
        self._group = placement_group([self.needs] * self._count, strategy=strategy)
        given = dict(self.needs)
        options: dict[str, Any] = {
            "num_cpus": given.pop("CPU", 0),
            "num_gpus": given.pop("GPU", 0),
            "resources": given,
            "max_restarts": -1,
            "max_task_retries": 0,
        }
        self._actors = [
            ray.remote(self._class)
            .options(
                **options,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            .remote(*self._arguments)
            for bundle in range(self._count)
        ]

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
        self.problem = (
            f"{self.what} waits for room on the Ray cluster: {shortage(self.needs, self._count)}"
        )
        if time.monotonic() - self._said > _SAY_EVERY:
            self._said = time.monotonic()
            log.warning("%s.", self.problem)
