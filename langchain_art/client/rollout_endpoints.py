"""Operations on rollouts that are put up on the server: of whoever trains, and of workers."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_art.client.endpoint import Address, endpoint
from langchain_art.client.http_request import Flow, Request
from langchain_art.client.routes import deleted, path_of
from langchain_art.wire import (
    AttemptOutcome,
    BatchStatus,
    LeaseRequest,
    Leases,
    LeasesHeld,
    LeasesLost,
    LeasesReturned,
    QueuedRollout,
    RolloutBatch,
    TakenRollouts,
    TakeRequest,
)
from langchain_art.wire.queue.rollouts import MAX_ROLLOUTS


class RolloutEndpoints(Address):
    """Puts rollouts up and takes finished ones; leases, renews and completes them."""

    @endpoint
    def put_rollouts(
        self, batch: str, rollout: str, rollouts: Sequence[QueuedRollout], max_attempts: int = 3
    ) -> Flow[None]:
        """Put rollouts up, for workers to lease. The same again changes nothing.

        Args:
            batch: id under which they are taken and cancelled.
            rollout: which function runs them: ``my_agent:rollout``.
            rollouts: any number.
            max_attempts: see `RolloutBatch`.

        Raises:
            Conflict: an id was used for another rollout, or the batch has others.
        """
        for start in range(0, len(rollouts), MAX_ROLLOUTS):
            some = RolloutBatch(
                batch=batch,
                rollout=rollout,
                rollouts=tuple(rollouts[start : start + MAX_ROLLOUTS]),
                max_attempts=max_attempts,
            )
            yield Request("POST", "/v1/rollouts", lambda _: None, body=some)

    @endpoint
    def rollouts(self, batch: str) -> Request[BatchStatus]:
        """Progress of a batch of rollouts. Raises NotFound."""
        return Request(
            "GET", path_of("rollouts", "batches", batch), BatchStatus.model_validate_json
        )

    @endpoint
    def take_rollouts(
        self, batch: str, done: Sequence[str] = (), *, limit: int = 100, wait: float = 0.0
    ) -> Request[TakenRollouts]:
        """Take finished rollouts of a batch. Raises NotFound.

        Args:
            batch: its id.
            done: ids of those that have arrived: the server deletes them.
            limit: the most that are wanted, up to 1000.
            wait: seconds, up to 30, to wait for one.
        """
        path = path_of("rollouts", "batches", batch, "take")
        body = TakeRequest(done=tuple(done), limit=limit, wait=wait)
        return Request("POST", path, TakenRollouts.model_validate_json, body=body, hold=wait)

    @endpoint
    def cancel_rollouts(self, batch: str) -> Request[str]:
        """Delete a batch with its rollouts, whatever their state; returns its id.

        Raises NotFound.
        """
        return Request("DELETE", path_of("rollouts", "batches", batch), deleted)

    @endpoint
    def lease_rollouts(self, asked: LeaseRequest) -> Request[Leases]:
        """Lease rollouts to a worker."""
        path = "/v1/rollouts/lease"
        return Request("POST", path, Leases.model_validate_json, body=asked, hold=asked.wait)

    @endpoint
    def renew_leases(self, held: LeasesHeld) -> Request[LeasesLost]:
        """Renew a worker's leases; the answer names those that have ended."""
        return Request("POST", "/v1/rollouts/heartbeat", LeasesLost.model_validate_json, body=held)

    @endpoint
    def return_leases(self, returned: LeasesReturned) -> Request[None]:
        """Hand leases back, for other workers."""
        return Request("POST", "/v1/rollouts/return", lambda _: None, body=returned)

    @endpoint
    def complete_rollout(self, rollout: str, outcome: AttemptOutcome) -> Request[None]:
        """End an attempt. The same again changes nothing.

        Args:
            rollout: its id.
            outcome: a trajectory, a reward for its tagged calls, or an error.

        Raises:
            Conflict: the lease has gone to another attempt, and this one is discarded.
            NotFound: the rollout was cancelled, or taken.
        """
        return Request(
            "POST", path_of("rollouts", rollout, "complete"), lambda _: None, body=outcome
        )
