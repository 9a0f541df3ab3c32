"""The server's HTTP API for people and programs: `ArtClient` and its async twin.

Every call is idempotent, so what the network or a busy server swallows is sent again until
`patience` runs out; then the caller gets `ServerUnreachable` or the server's own refusal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import httpx

from langchain_art import endpoints
from langchain_art.endpoints import Groups
from langchain_art.transport import RETRYABLE, Address, Flow, Request, unreachable
from langchain_art.wire import (
    Checkpoint,
    JobEvent,
    LoraConfig,
    PolicyStatus,
    Reward,
    ServerStatus,
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
        timeout: seconds for one attempt, beside what the server is asked to hold it open.
        patience: seconds to go on trying after connection errors and 429 or 503 answers.

    A `base_url` that is no http(s) URL raises `ConfigError`. All methods raise `ServerUnreachable`,
    or the `RequestRefused` that the server answered with.
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
        """Wait until the server can sample and train; up to `timeout` seconds, then raise."""
        return self._send(endpoints.ready(timeout))

    def status(self) -> ServerStatus:
        """What the server is and does."""
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
        """Let a version be pruned again."""
        return self._send(endpoints.pin(policy, version, pinned=False))

    def rollback(self, policy: str, version: int) -> PolicyStatus:
        """Route the policy's bare name to an earlier version."""
        return self._send(endpoints.rollback(policy, version))

    def delete_checkpoint(self, policy: str, version: int) -> str:
        """Delete a version; returns its name. Raises Conflict if it is in use."""
        return self._send(endpoints.delete_checkpoint(policy, version))

    def download_adapter(self, policy: str, version: int, dest: str | Path) -> Path:
        """Fetch a version in PEFT's format into the new directory `dest`, whole or not at all."""
        return self._run(endpoints.downloading(policy, version, Path(dest)))

    def post_trajectory(self, trajectory: Trajectory) -> bool:
        """Store a trajectory; False if it was there. Raises Conflict if it differs from that."""
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

    def reward(self, trajectory_id: str, reward: float | Reward) -> Trajectory:
        """Score a trajectory, or the calls that were tagged with its id."""
        return self._send(endpoints.reward(trajectory_id, reward))

    def audit(
        self,
        trajectory_id: str,
        policy: str | None = None,
        train: Mapping[str, bool] | None = None,
    ) -> TrajectoryAudit:
        """Which of a run's tokens learn, turn by turn, and why the others do not.

        Args:
            trajectory_id: of a stored trajectory.
            policy: the policy that is to learn. None: the one that sampled its calls.
            train: which calls learn (`Turn.learns`). None: all.

        Raises:
            NotFound: no such trajectory.
        """
        return self._send(endpoints.audit(trajectory_id, policy, train))

    def call(self, call_id: str) -> dict[str, Any]:
        """The server's record of one completion: token ids, logprobs, tags and the model."""
        return self._send(endpoints.call(call_id))

    def train(
        self,
        groups: Groups,
        policy: str,
        config: TrainConfig | None = None,
        key: str | None = None,
        train: Mapping[str, bool] | None = None,
    ) -> TrainJob:
        """Order one training step, and return at once.

        Args:
            groups: trajectory groups, which are posted first, or ids of posted trajectories.
            policy: the policy that learns.
            config: None: the defaults of `TrainConfig`.
            key: idempotency key: the same key and batch is the same job, the same key with
                another batch raises Conflict. None: a new job at each call.
            train: which calls learn, by node, tag or model (`Turn.learns`). None: all that the
                policy sampled.
        """
        return self._run(endpoints.training(groups, policy, config, key, train))

    def wait(
        self, job: TrainJob | str, on_event: Callable[[JobEvent], None] | None = None
    ) -> TrainResult:
        """Wait for a job's end, however long it takes.

        Args:
            job: the job or its id.
            on_event: hears each of the job's events, in order.

        Raises:
            JobFailed: with the server's words.
        """
        return self._run(endpoints.waiting(job, on_event))

    def job(self, job_id: str) -> TrainJob:
        """One job as it stands."""
        return self._send(endpoints.job(job_id))

    def jobs(self, policy: str | None = None) -> list[TrainJob]:
        """Jobs, of one policy or of all."""
        return self._send(endpoints.jobs(policy))


class AsyncArtClient(Address):
    """The async twin of `ArtClient`: same arguments, methods, errors. Bound to one event loop."""

    def _open(self) -> None:
        self._http = httpx.AsyncClient(**self._options())

    async def __aenter__(self) -> AsyncArtClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _send(self, request: Request[T]) -> T:
        backoff = self._backoff(request)
        while True:
            try:
                try:
                    async with self._http.stream(**request.arguments(self.timeout)) as response:
                        content = b""
                        if request.save is not None and response.is_success:
                            with request.save.open("wb") as file:
                                async for chunk in response.aiter_bytes():
                                    file.write(chunk)
                        else:
                            content = await response.aread()
                except httpx.TransportError as error:
                    raise unreachable(self.base_url, error) from error
                return request.result(response, content)
            except RETRYABLE as failure:
                await asyncio.sleep(backoff.after(failure))

    async def _run(self, flow: Flow[T]) -> T:
        with closing(flow):
            try:
                request = next(flow)
                while True:
                    request = flow.send(await self._send(request))
            except StopIteration as stop:
                return stop.value

    async def ready(self, timeout: float = 60.0) -> None:
        """See `ArtClient.ready`."""
        return await self._send(endpoints.ready(timeout))

    async def status(self) -> ServerStatus:
        """See `ArtClient.status`."""
        return await self._send(endpoints.status())

    async def models(self) -> list[str]:
        """See `ArtClient.models`."""
        return await self._send(endpoints.models())

    async def create_policy(self, name: str, lora: LoraConfig | None = None) -> PolicyStatus:
        """See `ArtClient.create_policy`."""
        return await self._send(endpoints.create_policy(name, lora))

    async def policies(self) -> list[PolicyStatus]:
        """See `ArtClient.policies`."""
        return await self._send(endpoints.policies())

    async def policy(self, name: str) -> PolicyStatus:
        """See `ArtClient.policy`."""
        return await self._send(endpoints.policy(name))

    async def checkpoints(self, policy: str) -> list[Checkpoint]:
        """See `ArtClient.checkpoints`."""
        return await self._send(endpoints.checkpoints(policy))

    async def pin(self, policy: str, version: int) -> Checkpoint:
        """See `ArtClient.pin`."""
        return await self._send(endpoints.pin(policy, version, pinned=True))

    async def unpin(self, policy: str, version: int) -> Checkpoint:
        """See `ArtClient.unpin`."""
        return await self._send(endpoints.pin(policy, version, pinned=False))

    async def rollback(self, policy: str, version: int) -> PolicyStatus:
        """See `ArtClient.rollback`."""
        return await self._send(endpoints.rollback(policy, version))

    async def delete_checkpoint(self, policy: str, version: int) -> str:
        """See `ArtClient.delete_checkpoint`."""
        return await self._send(endpoints.delete_checkpoint(policy, version))

    async def download_adapter(self, policy: str, version: int, dest: str | Path) -> Path:
        """See `ArtClient.download_adapter`."""
        return await self._run(endpoints.downloading(policy, version, Path(dest)))

    async def post_trajectory(self, trajectory: Trajectory) -> bool:
        """See `ArtClient.post_trajectory`."""
        return await self._send(endpoints.post_trajectory(trajectory))

    async def post_groups(self, groups: Sequence[TrajectoryGroup]) -> int:
        """See `ArtClient.post_groups`."""
        return await self._run(endpoints.posting(groups))

    async def trajectories(self, limit: int = 100, scenario: str | None = None) -> list[Trajectory]:
        """See `ArtClient.trajectories`."""
        return await self._send(endpoints.trajectories(limit, scenario))

    async def trajectory(self, trajectory_id: str) -> Trajectory:
        """See `ArtClient.trajectory`."""
        return await self._send(endpoints.trajectory(trajectory_id))

    async def reward(self, trajectory_id: str, reward: float | Reward) -> Trajectory:
        """See `ArtClient.reward`."""
        return await self._send(endpoints.reward(trajectory_id, reward))

    async def audit(
        self,
        trajectory_id: str,
        policy: str | None = None,
        train: Mapping[str, bool] | None = None,
    ) -> TrajectoryAudit:
        """See `ArtClient.audit`."""
        return await self._send(endpoints.audit(trajectory_id, policy, train))

    async def call(self, call_id: str) -> dict[str, Any]:
        """See `ArtClient.call`."""
        return await self._send(endpoints.call(call_id))

    async def train(
        self,
        groups: Groups,
        policy: str,
        config: TrainConfig | None = None,
        key: str | None = None,
        train: Mapping[str, bool] | None = None,
    ) -> TrainJob:
        """See `ArtClient.train`."""
        return await self._run(endpoints.training(groups, policy, config, key, train))

    async def wait(
        self, job: TrainJob | str, on_event: Callable[[JobEvent], None] | None = None
    ) -> TrainResult:
        """See `ArtClient.wait`."""
        return await self._run(endpoints.waiting(job, on_event))

    async def job(self, job_id: str) -> TrainJob:
        """See `ArtClient.job`."""
        return await self._send(endpoints.job(job_id))

    async def jobs(self, policy: str | None = None) -> list[TrainJob]:
        """See `ArtClient.jobs`."""
        return await self._send(endpoints.jobs(policy))
