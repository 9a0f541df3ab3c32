"""`ArtClient`, the client of the server's HTTP API; its async twin is in `async_client`.

Every call is idempotent, so it is retried after connection errors and 429 or 503 answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import httpx

from langchain_art.client import endpoints
from langchain_art.client.conversations import Conversations
from langchain_art.client.endpoints import Groups
from langchain_art.client.http_request import RETRYABLE, Address, Flow, Request, unreachable
from langchain_art.wire import (
    Checkpoint,
    JobEvent,
    LoraConfig,
    PolicyStatus,
    Reward,
    ServerStatus,
    SFTConfig,
    TrainConfig,
    TrainJob,
    TrainResult,
    Trajectory,
    TrajectoryAudit,
    TrajectoryGroup,
)

T = TypeVar("T")


class ArtClient(Address):
    """A blocking client. May be shared between threads.

    Example::

        with ArtClient() as client:
            job = client.train(groups, "email-agent", key="batch-7")
            print(client.wait(job).version)

    Args:
        base_url: ends with ``/v1`` (added if it is missing), as ChatART's. None: the environment
            variable ART_BASE_URL, else ``http://localhost:8000/v1``.
        api_key: sent as a bearer token. None: the environment variable ART_API_KEY, else no key.
        timeout: seconds for one attempt, in addition to the time of a long poll.
        patience: seconds to keep retrying after connection errors and 429 or 503 answers.

    Raises:
        ConfigError: `base_url` is not an http(s) URL.

    All methods raise `ServerUnreachable`, or the `RequestRefused` that the server answered with.
    """

    def _open(self) -> None:
        self._http = httpx.Client(**self._options())

    def __enter__(self) -> ArtClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _send(self, request: Request[T]) -> T:
        backoff = self._backoff(request)
        while True:
            try:
                try:
                    with self._http.stream(**request.arguments(self.timeout)) as response:
                        content = b""
                        if request.save is not None and response.is_success:
                            with request.save.open("wb") as file:
                                for chunk in response.iter_bytes():
                                    file.write(chunk)
                        else:
                            content = response.read()
                except httpx.TransportError as error:
                    raise unreachable(self.base_url, error) from error
                return request.result(response, content)
            except RETRYABLE as failure:
                time.sleep(backoff.after(failure))

    def _run(self, flow: Flow[T]) -> T:
        with closing(flow):
            try:
                request = next(flow)
                while True:
                    request = flow.send(self._send(request))
            except StopIteration as stop:
                return stop.value

    def ready(self, timeout: float = 60.0) -> None:
        """Wait up to `timeout` seconds until the server can sample and train, then raise."""
        return self._send(endpoints.ready(timeout))

    def status(self) -> ServerStatus:
        """The server's model, policies, engines and counts."""
        return self._send(endpoints.status())

    def models(self) -> list[str]:
        """Names that `model=` may have: the base model, policies and their versions."""
        return self._send(endpoints.models())

    def create_policy(self, name: str, lora: LoraConfig | None = None) -> PolicyStatus:
        """Make a policy. The same call again changes nothing; another `lora` raises Conflict."""
        return self._send(endpoints.create_policy(name, lora))

    def policies(self) -> list[PolicyStatus]:
        """All policies."""
        return self._send(endpoints.policies())

    def policy(self, name: str) -> PolicyStatus:
        """One policy. Raises NotFound."""
        return self._send(endpoints.policy(name))

    def checkpoints(self, policy: str) -> list[Checkpoint]:
        """The versions of a policy that the server keeps."""
        return self._send(endpoints.checkpoints(policy))

    def pin(self, policy: str, version: int) -> Checkpoint:
        """Keep a version from being pruned."""
        return self._send(endpoints.pin(policy, version, pinned=True))

    def unpin(self, policy: str, version: int) -> Checkpoint:
        """Allow a version to be pruned again."""
        return self._send(endpoints.pin(policy, version, pinned=False))

    def rollback(self, policy: str, version: int) -> PolicyStatus:
        """Route the policy's name to an earlier version."""
        return self._send(endpoints.rollback(policy, version))

    def delete_checkpoint(self, policy: str, version: int) -> str:
        """Delete a version; returns its name. Raises Conflict if it is in use."""
        return self._send(endpoints.delete_checkpoint(policy, version))

    def download_adapter(self, policy: str, version: int, dest: str | Path) -> Path:
        """Download a version in PEFT's format to the new directory `dest`, or raise."""
        return self._run(endpoints.downloading(policy, version, Path(dest)))

    def post_trajectory(self, trajectory: Trajectory) -> bool:
        """Store a trajectory; False if it was stored before. Raises Conflict if it differs."""
        return self._send(endpoints.post_trajectory(trajectory))

    def post_groups(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Store groups; returns how many of their trajectories were new."""
        return self._run(endpoints.posting(groups))

    def trajectories(self, limit: int = 100, scenario: str | None = None) -> list[Trajectory]:
        """Stored trajectories, newest first."""
        return self._send(endpoints.trajectories(limit, scenario))

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """One stored trajectory. Raises NotFound."""
        return self._send(endpoints.trajectory(trajectory_id))

    def reward(
        self,
        trajectory_id: str,
        reward: float | Reward | None = None,
        turns: Mapping[str, float] | None = None,
    ) -> Trajectory:
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
        return self._send(endpoints.reward(trajectory_id, reward, turns))

    def audit(
        self,
        trajectory_id: str,
        policy: str | None = None,
        trainable: Mapping[str, bool] | None = None,
        *,
        sft: bool = False,
    ) -> TrajectoryAudit:
        """Which of a run's tokens are trained, turn by turn, and why others are excluded.

        Args:
            trajectory_id: of a stored trajectory.
            policy: the policy that is trained. None: the one that sampled the calls.
            trainable: which calls learn (`Turn.learns`). None: all.
            sft: audit a supervised step (`sft`) instead of training on the reward.

        Raises:
            NotFound: no such trajectory.
        """
        return self._send(endpoints.audit(trajectory_id, policy, trainable, sft=sft))

    def call(self, call_id: str) -> dict[str, Any]:
        """The server's record of one completion: token ids, logprobs, tags and the model."""
        return self._send(endpoints.call(call_id))

    def train(
        self,
        groups: Groups,
        policy: str,
        config: TrainConfig | None = None,
        key: str | None = None,
        trainable: Mapping[str, bool] | None = None,
    ) -> TrainJob:
        """Order one training step, and return at once.

        Args:
            groups: trajectory groups, which are posted first, or ids of posted trajectories.
            policy: the policy that learns.
            config: None: the defaults of `TrainConfig`.
            key: idempotency key: the same key and batch is the same job, the same key with
                another batch raises Conflict. None: a new job at each call.
            trainable: which calls learn, by node, tag or model (`Turn.learns`). None: all that the
                policy sampled.
        """
        return self._run(endpoints.training(groups, policy, config, key, trainable))

    def sft(
        self,
        conversations: Conversations,
        policy: str,
        config: SFTConfig | None = None,
        key: str | None = None,
        trainable: Mapping[str, bool] | None = None,
    ) -> TrainJob:
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
        return self._run(endpoints.imitating(conversations, policy, config, key, trainable))

    def wait(
        self, job: TrainJob | str, on_event: Callable[[JobEvent], None] | None = None
    ) -> TrainResult:
        """Wait until a job ends, without a time limit.

        Args:
            job: the job or its id.
            on_event: called with each of the job's events, in order.

        Raises:
            JobFailed: with the server's message.
        """
        return self._run(endpoints.waiting(job, on_event))

    def job(self, job_id: str) -> TrainJob:
        """One job."""
        return self._send(endpoints.job(job_id))

    def jobs(self, policy: str | None = None) -> list[TrainJob]:
        """Jobs, of one policy or of all."""
        return self._send(endpoints.jobs(policy))
