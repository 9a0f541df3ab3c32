"""The server's HTTP API: every operation once, for the blocking and the async client.

An operation makes a `Request`, or a `Flow`: a generator that yields requests and receives their
answers. The client that it is a method of sends them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from langchain_art.client.adapter_archive import downloading
from langchain_art.client.conversations import (
    Conversations,
    read_conversations,
    sft_config,
    to_post,
)
from langchain_art.client.endpoint import Address, endpoint
from langchain_art.client.http_request import Flow, Request
from langchain_art.errors import ConfigError, JobFailed
from langchain_art.wire import (
    Checkpoint,
    JobEvent,
    LoraConfig,
    PolicySpec,
    PolicyStatus,
    Reward,
    ServerStatus,
    SFTConfig,
    TrainConfig,
    TrainJob,
    TrainRequest,
    TrainResult,
    Trajectory,
    TrajectoryAudit,
    TrajectoryGroup,
)

ModelT = TypeVar("ModelT", bound=BaseModel)
Groups: TypeAlias = Sequence[TrajectoryGroup] | Sequence[Sequence[str]]
"""Trajectory groups, or the ids of trajectories that the server has."""


class Endpoints(Address):
    """The operations, as methods that both clients have.

    What an operation is annotated to return in brackets is what `ArtClient` returns, and
    `AsyncArtClient` returns when it is awaited.
    """

    @endpoint
    def ready(self, timeout: float = 60.0) -> Request[None]:
        """Wait up to `timeout` seconds until the server can sample and train, then raise."""
        return Request("GET", "/readyz", lambda _: None, patience=timeout)

    @endpoint
    def status(self) -> Request[ServerStatus]:
        """The server's model, policies, engines and counts."""
        return Request("GET", "/status", ServerStatus.model_validate_json)

    @endpoint
    def models(self) -> Request[list[str]]:
        """Names that `model=` may have: the base model, policies and their versions."""
        return Request("GET", "/v1/models", lambda b: [one["id"] for one in json.loads(b)["data"]])

    @endpoint
    def create_policy(self, name: str, lora: LoraConfig | None = None) -> Request[PolicyStatus]:
        """Make a policy. The same call again changes nothing; another `lora` raises Conflict."""
        spec = PolicySpec(name=name, lora=lora or LoraConfig())
        return Request("POST", "/v1/policies", PolicyStatus.model_validate_json, body=spec)

    @endpoint
    def policies(self) -> Request[list[PolicyStatus]]:
        """All policies."""
        return Request("GET", "/v1/policies", _many(PolicyStatus))

    @endpoint
    def policy(self, name: str) -> Request[PolicyStatus]:
        """One policy. Raises NotFound."""
        return Request("GET", _path("policies", name), PolicyStatus.model_validate_json)

    @endpoint
    def checkpoints(self, policy: str) -> Request[list[Checkpoint]]:
        """The versions of a policy that the server keeps."""
        return Request("GET", _path("policies", policy, "checkpoints"), _many(Checkpoint))

    @endpoint
    def pin(self, policy: str, version: int) -> Request[Checkpoint]:
        """Keep a version from being pruned."""
        return Request("PUT", _version(policy, version, "pin"), Checkpoint.model_validate_json)

    @endpoint
    def unpin(self, policy: str, version: int) -> Request[Checkpoint]:
        """Allow a version to be pruned again."""
        return Request("DELETE", _version(policy, version, "pin"), Checkpoint.model_validate_json)

    @endpoint
    def rollback(self, policy: str, version: int) -> Request[PolicyStatus]:
        """Route the policy's name to an earlier version."""
        path, body = _path("policies", policy, "rollback"), {"version": version}
        return Request("POST", path, PolicyStatus.model_validate_json, body=body)

    @endpoint
    def delete_checkpoint(self, policy: str, version: int) -> Request[str]:
        """Delete a version; returns its name. Raises Conflict if it is in use."""
        return Request("DELETE", _version(policy, version), lambda b: str(json.loads(b)["deleted"]))

    @endpoint
    def download_adapter(self, policy: str, version: int, dest: str | Path) -> Flow[Path]:
        """Download a version in PEFT's format to the new directory `dest`, or raise."""
        return downloading(_version(policy, version, "adapter"), Path(dest))

    @endpoint
    def post_trajectory(self, trajectory: Trajectory) -> Request[bool]:
        """Store a trajectory; False if it was stored before. Raises Conflict if it differs."""
        return Request("POST", "/v1/trajectories", lambda b: bool(_stored(b)), body=trajectory)

    @endpoint
    def post_groups(self, groups: Sequence[TrajectoryGroup]) -> Flow[int]:
        """Store groups; returns how many of their trajectories were new."""
        stored = 0
        for group in groups:
            stored += yield _post_group(group)
        return stored

    @endpoint
    def trajectories(
        self, limit: int = 100, scenario: str | None = None
    ) -> Request[list[Trajectory]]:
        """Stored trajectories, newest first."""
        params = {"limit": limit, "scenario": scenario}
        return Request("GET", "/v1/trajectories", _many(Trajectory), params)

    @endpoint
    def trajectory(self, trajectory_id: str) -> Request[Trajectory]:
        """One stored trajectory. Raises NotFound."""
        return Request("GET", _path("trajectories", trajectory_id), Trajectory.model_validate_json)

    @endpoint
    def reward(
        self,
        trajectory_id: str,
        reward: float | Reward | None = None,
        turns: Mapping[str, float] | None = None,
    ) -> Request[Trajectory]:
        """Score a trajectory, or the calls that were tagged with its id.

        Args:
            trajectory_id: of a stored trajectory, or the tag of calls.
            reward: of the whole run, or a `Reward` with more fields. None: unchanged.
            turns: call id -> reward of that call alone.

        Raises:
            ConfigError: a reward is not a finite number.
            RequestRefused: the trajectory is not known (`NotFound`), has no such call
                (`InvalidRequest`), or was trained on with another reward (`Conflict`).
        """
        given = reward.model_dump(exclude_unset=True) if isinstance(reward, Reward) else {}
        if reward is not None and not isinstance(reward, Reward):
            given["reward"] = reward
        if turns:
            given["turns"] = dict(turns)
        try:
            body = Reward(**given)
        except ValidationError as error:
            raise ConfigError(f"This is no reward: {error}") from error
        path = _path("trajectories", trajectory_id, "reward")
        return Request("PUT", path, Trajectory.model_validate_json, body=body)

    @endpoint
    def audit(
        self,
        trajectory_id: str,
        policy: str | None = None,
        trainable: Mapping[str, bool] | None = None,
        *,
        sft: bool = False,
    ) -> Request[TrajectoryAudit]:
        """Which of a run's tokens are trained, turn by turn, and why others are excluded.

        Args:
            trajectory_id: of a stored trajectory.
            policy: the policy that is trained. None: the one that sampled the calls.
            trainable: which calls learn (`Turn.learns`). None: all.
            sft: audit a supervised step (`sft`) instead of training on the reward.

        Raises:
            NotFound: no such trajectory.
        """
        chosen = [f"{name}:{str(learns).lower()}" for name, learns in (trainable or {}).items()]
        params = {"policy": policy, "trainable": chosen, "sft": "true" if sft else None}
        path = _path("trajectories", trajectory_id, "audit")
        return Request("GET", path, TrajectoryAudit.model_validate_json, params)

    @endpoint
    def call(self, call_id: str) -> Request[dict[str, Any]]:
        """The server's record of one completion: token ids, logprobs, tags and the model."""
        return Request("GET", _path("calls", call_id), json.loads)

    @endpoint
    def train(
        self,
        groups: Groups,
        policy: str,
        config: TrainConfig | None = None,
        key: str | None = None,
        trainable: Mapping[str, bool] | None = None,
        retrain: bool = False,
    ) -> Flow[TrainJob]:
        """Order one training step, and return at once.

        Args:
            groups: trajectory groups, which are posted first, or ids of posted trajectories.
            policy: the policy that learns.
            config: None: the defaults of `TrainConfig`.
            key: idempotency key: the same key and batch is the same job, the same key with
                another batch raises Conflict. None: a new job at each call.
            trainable: which calls learn, by node, tag or model (`Turn.learns`). None: all that the
                policy sampled.
            retrain: train also what earlier jobs trained (`TrainRequest.retrain`).
        """
        ids: list[tuple[str, ...]] = []
        for group in groups:
            if isinstance(group, TrajectoryGroup):
                yield _post_group(group)
                ids.append(tuple(run.id for run in group.trajectories))
            else:
                ids.append(tuple(group))
        what = {"policy": policy, "groups": tuple(ids), "config": config or TrainConfig()}
        return (yield _order(key, trainable, **what, retrain=retrain))

    @endpoint
    def sft(
        self,
        conversations: Conversations,
        policy: str,
        config: SFTConfig | None = None,
        key: str | None = None,
        trainable: Mapping[str, bool] | None = None,
    ) -> Flow[TrainJob]:
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

        Raises:
            ConfigError: a conversation is malformed, or `config` is no SFTConfig.
        """
        config = sft_config(config)
        read = read_conversations(conversations)
        for group in to_post(read):
            yield _post_group(group)
        ids = tuple(one if isinstance(one, str) else one.id for one in read)
        return (yield _order(key, trainable, policy=policy, groups=(ids,), config=config))

    @endpoint
    def wait(
        self, job: TrainJob | str, on_event: Callable[[JobEvent], None] | None = None
    ) -> Flow[TrainResult]:
        """Wait until a job ends, without a time limit.

        Args:
            job: the job or its id.
            on_event: called with each of the job's events, in order.

        Raises:
            JobFailed: with the server's message.
        """
        path, seen = _path("jobs", job if isinstance(job, str) else job.id), 0
        # With `on_event` the long poll is short, so that events arrive within a second.
        hold = 1.0 if on_event else 25.0
        poll = Request("GET", path, TrainJob.model_validate_json, {"wait": hold}, hold=hold)
        while True:
            state: TrainJob = yield poll
            if on_event:
                events: list[JobEvent]
                events = yield Request("GET", f"{path}/events", _many(JobEvent), {"after": seen})
                for event in events:
                    seen = max(seen, event.seq)
                    on_event(event)
            if state.state == "failed":
                raise JobFailed(f"Job {state.id} of policy {state.policy!r} failed: {state.error}")
            if state.result is not None:
                return state.result

    @endpoint
    def job(self, job_id: str) -> Request[TrainJob]:
        """One job."""
        return Request("GET", _path("jobs", job_id), TrainJob.model_validate_json)

    @endpoint
    def jobs(self, policy: str | None = None) -> Request[list[TrainJob]]:
        """Jobs, of one policy or of all."""
        return Request("GET", "/v1/jobs", _many(TrainJob), {"policy": policy})


def _path(*parts: str | int) -> str:
    return "/".join(["/v1", *(quote(str(part), safe="") for part in parts)])


def _version(policy: str, version: int, *parts: str) -> str:
    return _path("policies", policy, "checkpoints", version, *parts)


def _many(model: type[ModelT]) -> Callable[[bytes], list[ModelT]]:
    """Reader of ``{"data": [...]}``."""
    return lambda content: [model.model_validate(item) for item in json.loads(content)["data"]]


def _stored(content: bytes) -> int:
    return int(json.loads(content)["stored"])


def _post_group(group: TrajectoryGroup) -> Request[int]:
    return Request("POST", "/v1/groups", _stored, body=group)


def _order(key: str | None, names: Mapping[str, bool] | None, **fields: Any) -> Request[TrainJob]:
    """The request for a job on posted trajectories; `fields` are those of `TrainRequest`."""
    try:
        body = TrainRequest(trainable=dict(names or {}), **fields)
    except ValidationError as error:
        raise ConfigError(f"This cannot be trained on: {error}") from error
    headers = {"Idempotency-Key": key or f"once:{uuid.uuid4()}"}
    return Request("POST", "/v1/train", TrainJob.model_validate_json, body=body, headers=headers)
