"""`AsyncArtClient`: the async twin of `sync_client.ArtClient`."""

from __future__ import annotations

import asyncio
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


class AsyncArtClient(Address):
    """`ArtClient` with async methods: the same arguments and errors. Bound to one event loop."""

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

    async def reward(
        self,
        trajectory_id: str,
        reward: float | Reward | None = None,
        turns: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """See `ArtClient.reward`."""
        return await self._send(endpoints.reward(trajectory_id, reward, turns))

    async def audit(
        self,
        trajectory_id: str,
        policy: str | None = None,
        trainable: Mapping[str, bool] | None = None,
        *,
        sft: bool = False,
    ) -> TrajectoryAudit:
        """See `ArtClient.audit`."""
        return await self._send(endpoints.audit(trajectory_id, policy, trainable, sft=sft))

    async def call(self, call_id: str) -> dict[str, Any]:
        """See `ArtClient.call`."""
        return await self._send(endpoints.call(call_id))

    async def train(
        self,
        groups: Groups,
        policy: str,
        config: TrainConfig | None = None,
        key: str | None = None,
        trainable: Mapping[str, bool] | None = None,
    ) -> TrainJob:
        """See `ArtClient.train`."""
        return await self._run(endpoints.training(groups, policy, config, key, trainable))

    async def sft(
        self,
        conversations: Conversations,
        policy: str,
        config: SFTConfig | None = None,
        key: str | None = None,
        trainable: Mapping[str, bool] | None = None,
    ) -> TrainJob:
        """See `ArtClient.sft`."""
        return await self._run(endpoints.imitating(conversations, policy, config, key, trainable))

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
