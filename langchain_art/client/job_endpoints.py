"""Operations on training jobs, and on rollouts that are put up for workers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import ValidationError

from langchain_art import wire
from langchain_art.client.conversations import (
    Conversation,
    Conversations,
    read_conversations,
    sft_config,
    to_post,
)
from langchain_art.client.http_request import (
    Address,
    Flow,
    Request,
    deleted,
    endpoint,
    pages,
    path_of,
    post_group,
)
from langchain_art.errors import BodyTooLarge, ConfigError, JobFailed
from langchain_art.wire.field_hints import in_words
from langchain_art.wire.rollouts import MAX_ROLLOUTS
from langchain_art.wire.training import CallAdvantage

Groups: TypeAlias = Sequence[wire.TrajectoryGroup] | Sequence[Sequence[str]]
"""Trajectory groups, or the ids of trajectories that the server has."""


class JobEndpoints(Address):
    """Orders training steps; puts rollouts up and takes them; leases, renews and completes them."""

    @endpoint
    def train(
        self,
        groups: Groups,
        policy: str,
        config: wire.TrainConfig | None = None,
        key: str | None = None,
        trainable: Mapping[str, bool] | None = None,
        retrain: bool = False,
        rewards: Mapping[str, float] | None = None,
        turns: Mapping[str, float] | None = None,
        advantages: Mapping[str, Sequence[CallAdvantage | None]] | None = None,
        seconds: wire.StepSeconds | None = None,
        schedule_step: int | None = None,
    ) -> Flow[wire.TrainJob]:
        """Order one training step, and return at once.

        Args:
            groups: trajectory groups, which are posted first, or ids of posted trajectories.
            policy: the policy that learns.
            config: None: the defaults of `TrainConfig`.
            key: idempotency key: the same key and batch is the same job, the same key with
                another batch raises Conflict. None: a new job at each call. A job that failed for a
                reason that may pass (`TrainJob.retryable`) is queued again.
            trainable: which calls learn, by node, tag or model (`Turn.learns`). None: all that the
                policy sampled.
            retrain: train also what earlier jobs trained (`TrainRequest.retrain`).
            rewards: run's id -> its reward for this job alone (`TrainRequest.rewards`). None: the
                rewards that the runs have.
            turns: call's id -> the same of a call (`TrainRequest.turns`).
            advantages: run's id -> for each of its turns the advantage of its tokens, in place of
                what `config` computes (`TrainRequest.advantages`). None: `config` computes all.
            seconds: how long the batch took, for the server's page. None: not known.
            schedule_step: the step of the learning rate's schedule, from 1
                (`TrainRequest.schedule_step`). None: how many steps the version is away from the
                base.
        """
        ids: list[tuple[str, ...]] = []
        for group in groups:
            if isinstance(group, wire.TrajectoryGroup):
                yield from post_group(group)
                ids.append(tuple(run.id for run in group.trajectories))
            else:
                ids.append(tuple(group))
        what = {"policy": policy, "groups": tuple(ids), "config": config or wire.TrainConfig()}
        what |= {"rewards": dict(rewards or {}), "turns": dict(turns or {}), "seconds": seconds}
        what |= {"advantages": None if advantages is None else dict(advantages)}
        return (yield _order(key, trainable, **what, retrain=retrain, schedule_step=schedule_step))

    @endpoint
    def sft(
        self,
        conversations: Conversations,
        policy: str,
        config: wire.SFTConfig | None = None,
        key: str | None = None,
        trainable: Mapping[str, bool] | None = None,
        schedule_step: int | None = None,
    ) -> Flow[wire.TrainJob]:
        """Order one supervised step: the policy learns to say what the assistant says here.

        The loss is the mean negative log-likelihood of the assistant's tokens, in nats
        (``metrics["loss"]`` of the result). Runs that were sampled by this server count with the
        tokens that were sampled, of whichever policy; all else is written with the model's chat
        template. Unlike `train`, the same run may be learned from again and again.

        Args:
            conversations: runs, ids of runs, conversations in OpenAI's or LangChain's messages, or
                the path of a JSONL file of them (`conversations.Conversation`).
            policy: the policy that learns.
            config: None: the defaults of `SFTConfig`.
            key: as for `train`.
            trainable: as for `train`.
            schedule_step: as for `train`.

        Raises:
            ConfigError: a conversation is malformed, or `config` is no SFTConfig.
        """
        config = sft_config(config)
        read = read_conversations(conversations)
        for group in to_post(read):
            yield from post_group(group)
        ids = tuple(one if isinstance(one, str) else one.id for one in read)
        what = {"policy": policy, "groups": (ids,), "config": config}
        return (yield _order(key, trainable, **what, schedule_step=schedule_step))

    @endpoint
    def prefer(
        self,
        pairs: Sequence[tuple[Conversation, Conversation]],
        policy: str,
        config: wire.PreferenceConfig | None = None,
        key: str | None = None,
    ) -> Flow[wire.TrainJob]:
        """Order one preference step (DPO): the policy learns to say rather the first of each pair.

        ``preference_loss``, ``preference_margin``, ``preference_accuracy`` and ``chosen_logprob``
        of the result's metrics are those before the step. A pair may be learned from again, and a
        run may be in several pairs.

        Args:
            pairs: chosen and rejected, each as `sft` takes a conversation. A reply that was written
                by hand beside one that was sampled here is compared on the same prompt tokens.
            policy: the policy that learns.
            config: None: the defaults of `PreferenceConfig`.
            key: as for `train`.

        Raises:
            ConfigError: there is no pair, a conversation is malformed, or two different runs have
                the same id.
        """
        read = [read_conversations(pair) for pair in pairs]
        if not read or any(len(pair) != 2 for pair in read):
            raise ConfigError(
                f"got {len(read)} pairs of the lengths {sorted({len(pair) for pair in read})}, "
                "expected at least one pair: the chosen conversation and the rejected one"
            )
        for group in to_post([one for pair in read for one in pair]):
            yield from post_group(group)
        ids = tuple(tuple(one if isinstance(one, str) else one.id for one in pair) for pair in read)
        config = config or wire.PreferenceConfig()
        return (yield _order(key, None, policy=policy, groups=ids, config=config))

    @endpoint
    def plan_reviews(self, asked: wire.ReviewTraining | str) -> Request[wire.ReviewPlan]:
        """Plan a step by reviews: what it would train now, and why it leaves other verdicts out.

        Args:
            asked: the step, or the policy that learns by the defaults of `ReviewTraining`.
        """
        body = wire.ReviewTraining(policy=asked) if isinstance(asked, str) else asked
        return Request("POST", "/v1/reviews/plan", wire.ReviewPlan, body=body)

    @endpoint
    def train_reviews(
        self, asked: wire.ReviewTraining | str, key: str | None = None
    ) -> Request[list[wire.TrainJob]]:
        """Order a step by reviews: a job by rewards, and jobs on corrected replies.

        Each verdict is trained once with each of its values, however often this is called. Its
        runs' own rewards stay as they are. There are no jobs if there is nothing to train.

        Args:
            asked: as for `plan_reviews`; with `ReviewTraining.plan`, the very plan that was shown.
            key: as for `train`, of at most 120 characters.

        Raises:
            Conflict: the plan is another one by now.
        """
        body = wire.ReviewTraining(policy=asked) if isinstance(asked, str) else asked
        headers = {"Idempotency-Key": key or f"once:{uuid.uuid4()}"}

        def jobs(content: bytes) -> list[wire.TrainJob]:
            return list(wire.ReviewJobs.model_validate_json(content).jobs)

        return Request("POST", "/v1/reviews/train", jobs, body=body, headers=headers)

    @endpoint
    def wait(
        self, job: wire.TrainJob | str, on_event: Callable[[wire.JobEvent], None] | None = None
    ) -> Flow[wire.TrainResult]:
        """Wait until a job ends, without a time limit.

        Args:
            job: the job or its id.
            on_event: called with each of the job's events, in order.

        Raises:
            JobFailed: with the server's message; or it was cancelled.
        """
        path, seen = path_of("jobs", job if isinstance(job, str) else job.id), 0
        # With `on_event` the long poll is short, so that events arrive within a second.
        hold = 1.0 if on_event else 25.0
        poll = Request("GET", path, wire.TrainJob, {"wait": hold}, hold=hold)
        while True:
            state: wire.TrainJob = yield poll
            if on_event:
                for event in (
                    yield from pages(f"{path}/events", wire.JobEvent, {}, after=str(seen))
                ):
                    seen = max(seen, event.seq)
                    on_event(event)
            if state.state == "failed":
                raise JobFailed(f"Job {state.id} of policy {state.policy!r} failed: {state.error}")
            if state.state == "cancelled":
                raise JobFailed(
                    f"Job {state.id} of policy {state.policy!r} was cancelled; the policy is as it "
                    "was. Order the step again with another key if it is wanted after all."
                )
            if state.result is not None:
                return state.result

    @endpoint
    def job(self, job_id: str) -> Request[wire.TrainJob]:
        """One job."""
        return Request("GET", path_of("jobs", job_id), wire.TrainJob)

    @endpoint
    def jobs(self, policy: str | None = None) -> Flow[list[wire.TrainJob]]:
        """Jobs, of one policy or of all, oldest first."""
        return pages("/v1/jobs", wire.TrainJob, {"policy": policy})

    @endpoint
    def cancel(self, job: wire.TrainJob | str) -> Request[wire.TrainJob]:
        """Cancel a job that waits or runs: its step is stopped, and nothing is published.

        Raises Conflict if it has ended, or publishes its version just now.
        """
        path = path_of("jobs", job if isinstance(job, str) else job.id, "cancel")
        return Request("POST", path, wire.TrainJob, hold=30.0)

    @endpoint
    def put_rollouts(
        self, batch: str, rollout: str, rollouts: Sequence[wire.QueuedRollout]
    ) -> Flow[None]:
        """Put rollouts up, for workers to lease. The same again changes nothing.

        Args:
            batch: id under which they are taken and cancelled.
            rollout: which function runs them: ``my_agent:rollout``.
            rollouts: any number.

        Raises:
            Conflict: an id was used for another rollout, or the batch has others.
        """
        starts = range(0, len(rollouts), MAX_ROLLOUTS)
        parts = [tuple(rollouts[start : start + MAX_ROLLOUTS]) for start in starts]
        while parts:
            some = parts.pop(0)
            asked = wire.RolloutBatch(batch=batch, rollout=rollout, rollouts=some)
            try:
                yield Request("POST", "/v1/rollouts", lambda _: None, body=asked)
            except BodyTooLarge:
                if len(some) == 1:
                    raise
                half = len(some) // 2
                parts[:0] = some[:half], some[half:]

    @endpoint
    def rollouts(self, batch: str) -> Request[wire.BatchStatus]:
        """Progress of a batch of rollouts. Raises NotFound."""
        return Request("GET", path_of("rollouts", "batches", batch), wire.BatchStatus)

    @endpoint
    def take_rollouts(
        self, batch: str, done: Sequence[str] = (), *, wait: float = 0.0
    ) -> Request[wire.TakenRollouts]:
        """Take finished rollouts of a batch, up to 100. Raises NotFound.

        Args:
            batch: its id.
            done: ids of those that have arrived: the server deletes them.
            wait: seconds, up to 30, to wait for one.
        """
        path = path_of("rollouts", "batches", batch, "take")
        body = wire.TakeRequest(done=tuple(done), wait=wait)
        return Request("POST", path, wire.TakenRollouts, body=body, hold=wait)

    @endpoint
    def cancel_rollouts(self, batch: str) -> Request[str]:
        """Delete a batch with its rollouts, whatever their state; returns its id.

        Raises NotFound.
        """
        return Request("DELETE", path_of("rollouts", "batches", batch), deleted)

    @endpoint
    def lease_rollouts(self, asked: wire.LeaseRequest) -> Request[wire.Leases]:
        """Lease rollouts to a worker."""
        path = "/v1/rollouts/lease"
        return Request("POST", path, wire.Leases, body=asked, hold=asked.wait)

    @endpoint
    def renew_leases(self, held: wire.LeasesHeld) -> Request[wire.LeasesLost]:
        """Renew a worker's leases; the answer names those that have ended."""
        return Request("POST", "/v1/rollouts/heartbeat", wire.LeasesLost, body=held)

    @endpoint
    def return_leases(self, returned: wire.LeasesReturned) -> Request[None]:
        """Hand leases back, for other workers."""
        return Request("POST", "/v1/rollouts/return", lambda _: None, body=returned)

    @endpoint
    def complete_rollout(self, rollout: str, outcome: wire.AttemptOutcome) -> Request[None]:
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


def _order(
    key: str | None, names: Mapping[str, bool] | None, **fields: Any
) -> Request[wire.TrainJob]:
    """The request for a job on posted trajectories; `fields` are those of `TrainRequest`."""
    try:
        body = wire.TrainRequest(trainable=dict(names or {}), **fields)
    except ValidationError as error:
        words = in_words(error, wire.TrainRequest)
        raise ConfigError(f"This cannot be trained on: {words}") from error
    headers = {"Idempotency-Key": key or f"once:{uuid.uuid4()}"}
    return Request("POST", "/v1/train", wire.TrainJob, body=body, headers=headers)
