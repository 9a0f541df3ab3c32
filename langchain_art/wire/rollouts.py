"""Rollouts that are put up on the server, leased by workers, and taken when they are finished.

A rollout is *queued*, *leased* to one worker until a time, or *finished*. A lease that is not
renewed ends, and the rollout is given out again as its next attempt.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from langchain_art.wire.identifiers import Finite, Id, RewardValue, ScenarioName, Several, Wire
from langchain_art.wire.trajectories import Trajectory

#: The most rollouts of one request, and that one worker runs at once.
MAX_ROLLOUTS = 1000
#: Seconds that the server holds a request open, at most.
MAX_HOLD = 30.0
#: Name of the function that a rollout runs, as a Python worker gets it: ``my_agent:rollout``.
RolloutName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]
Held = Annotated[Several[Id], Field(max_length=MAX_ROLLOUTS)]
_Words = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
_Wait = Annotated[Finite, Field(ge=0, le=MAX_HOLD)]
_LeaseSeconds = Annotated[Finite, Field(ge=1, le=3600)]


class QueuedRollout(Wire):
    """One rollout to run."""

    id: Id
    scenario: Any = None
    """Argument of the rollout: any JSON value."""
    name: ScenarioName | None = None
    """The scenario's; the trajectory gets it."""
    seed: _Words | None = None
    """Seed from which whoever runs it samples: `call_seeds.RunSeed.key`."""


class RolloutBatch(Wire):
    """Rollouts to put up. The same again changes nothing."""

    batch: Id
    """Rollouts of one batch are taken and cancelled together. It lives for ten minutes after it was
    last put up or taken from."""
    rollout: RolloutName
    rollouts: Several[QueuedRollout] = Field(max_length=MAX_ROLLOUTS)
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Number of attempts that raised, or whose leases ended, after which a rollout is finished
    without a trajectory. Attempts that were handed back do not count."""

    @field_validator("rollouts")
    @classmethod
    def _distinct(cls, value: tuple[QueuedRollout, ...]) -> tuple[QueuedRollout, ...]:
        times = Counter(one.id for one in value)
        if twice := [id_ for id_, count in times.items() if count > 1][:5]:
            raise ValueError(f"got the same rollout twice: {twice}")
        return value


class LeaseRequest(Wire):
    """Request of a worker for leases. It may ask again only when the last request is answered."""

    worker: Id
    """Id of the worker, chosen when it starts, and never that of another process."""
    name: _Words = ""
    """Name for people: its machine and process."""
    rollout: RolloutName
    slots: int = Field(ge=1, le=MAX_ROLLOUTS)
    """Rollouts that it runs at once."""
    free: int = Field(ge=0, le=MAX_ROLLOUTS)
    """Number of further rollouts that it can begin now."""
    holds: Held = ()
    """Trajectory ids of all leases that it has. They are renewed; other leases of this worker were
    in an answer that did not arrive, and are given out again."""
    seconds: _LeaseSeconds = 60.0
    """Seconds after which a lease ends, unless it is renewed."""
    wait: _Wait = 0.0
    """Seconds to wait for a rollout, if there is none."""


class RolloutLease(Wire):
    """A rollout that a worker is to run now."""

    id: Id
    batch: Id
    scenario: Any
    name: ScenarioName | None
    seed: str | None
    """Each attempt samples from it anew. None: not seeded."""
    attempt: int
    """Number of the attempt, from 1."""
    trajectory_id: Id
    """Id of this attempt, which renews and completes it. Calls tagged with it become the
    trajectory of a rollout that is completed without one."""


class Leases(Wire):
    """The answer to a `LeaseRequest`."""

    leases: Several[RolloutLease]
    lost: Several[Id] = ()
    """Leases of `holds` that have ended. Stop their runs; they are not taken any more."""
    others: Several[RolloutName] = ()
    """Other rollouts that could be leased: a hint that this worker serves the wrong one."""


class LeasesHeld(Wire):
    """The leases that a worker has, to renew them or to hand them back."""

    worker: Id
    holds: Held
    seconds: _LeaseSeconds = 60.0


class LeasesReturned(Wire):
    """Leases that a worker hands back: their rollouts are given out again, to any worker."""

    worker: Id
    holds: Held = ()
    leaving: bool = False
    """It leases no more, and is not listed any more."""


class LeasesLost(Wire):
    """Leases that have ended."""

    lost: Several[Id]


class AttemptOutcome(Wire):
    """Outcome of an attempt: a trajectory, a reward for its tagged calls, or an error."""

    trajectory_id: Id
    """Id of the lease."""
    trajectory: Trajectory | None = None
    """Record of the run, failed runs included. Left out, without an error: it is assembled from the
    calls that were tagged with `trajectory_id`."""
    reward: RewardValue | None = None
    """Reward of the assembled trajectory; a trajectory that is sent has its own."""
    error: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")] | None = None
    """Reason for which there is none. The rollout is given out again, unless this was its last
    attempt."""
    fatal: bool = False
    """The error is of the program, and more attempts would only hide it: there is none."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> AttemptOutcome:
        given = [
            name for name in ("trajectory", "reward", "error") if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"got {' and '.join(given)}, expected one of them")
        if self.fatal and self.error is None:
            raise ValueError("got fatal without an error, expected the error")
        return self


class FinishedRollout(Wire):
    """A finished rollout, until it is taken."""

    id: Id
    attempt: int
    """The attempt that finished it."""
    trajectory: Trajectory | None = None
    error: str | None = None
    """Error of the last attempt, if there is no trajectory."""
    fatal: bool = False


class TakeRequest(Wire):
    """Poll by the submitter of a batch."""

    done: Held = ()
    """Ids of finished rollouts that have arrived: the server deletes them."""
    limit: int = Field(default=100, ge=1, le=MAX_ROLLOUTS)
    wait: _Wait = 0.0
    """Seconds to wait for a finished one, if there is none."""


class BatchStatus(Wire):
    """Progress of a batch."""

    batch: Id
    rollout: RolloutName
    queued: int
    leased: int
    finished: int
    """Number of finished rollouts that were not taken yet."""
    expired: int
    """Leases that ended because they were not renewed."""
    late: int
    """Attempts that were completed after their lease had gone elsewhere, and so discarded."""
    workers: int
    """Workers that lease this rollout and sent a request in the last 45 s."""


class TakenRollouts(Wire):
    """Finished rollouts of a batch, those that finished first among them."""

    finished: Several[FinishedRollout]
    status: BatchStatus


class WorkerStatus(Wire):
    """A process that leases rollouts."""

    id: Id
    name: str
    rollout: RolloutName
    slots: int
    leased: int
    finished: int
    """Rollouts that it completed with a trajectory."""
    failed: int
    """Failed runs among these, and attempts that it completed with an error."""
    expired: int
    """Leases of it that ended because they were not renewed."""
    heard_seconds: float
    """Seconds since its last request. After 45 s it counts as gone."""
