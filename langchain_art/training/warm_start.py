"""A supervised warm start: what `Trainer.warm_start` runs, and what resumes it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.conversations import Conversations, read_conversations
from langchain_art.errors import ConfigError, JobFailed
from langchain_art.training.progress import Display
from langchain_art.training.results import Record
from langchain_art.wire import SFTConfig, TrainResult, Trajectory, TrajectoryGroup

#: Conversations in one request to store them.
AT_ONCE = 64


class WarmStart(Record):
    """A supervised warm start, as ``warm_start.json`` keeps it.

    Example::

        warmed = trainer.warm_start_sync(Path("demonstrations.jsonl"), epochs=2)
        warmed.losses[0], warmed.losses[-1]     # 2.31, 0.74
    """

    id: str
    policy: str
    digest: str
    """Of all that it was asked to do."""
    conversations: int
    failed: dict[int, int] = Field(default_factory=dict)
    """step -> times that its job failed; each new attempt needs a new key."""
    results: tuple[TrainResult, ...] = ()
    """Of each step, in order."""

    @property
    def losses(self) -> list[float]:
        """Of each step: the mean negative log-likelihood of its tokens before it, in nats."""
        return [result.metrics["loss"] for result in self.results if "loss" in result.metrics]

    @property
    def version(self) -> int | None:
        """The version that the last step made; None before the first."""
        return self.results[-1].version if self.results else None

    def key(self, step: int) -> str:
        """The idempotency key of a step's job: the same step is never trained twice."""
        attempt = self.failed.get(step, 0)
        return f"{self.id}:sft:{step}" + (f":{attempt + 1}" if attempt else "")


class Demonstrations:
    """Conversations, and the order in which they are learned.

    Args:
        conversations: see `conversations.read_conversations`.
        epochs: how often each is learned.
        batch_size: conversations of one step; the last of an epoch may have fewer.
        seed: of the order, which is another in each epoch.

    Raises:
        ConfigError: a number is below 1, or a conversation is malformed.
    """

    def __init__(
        self, conversations: Conversations, epochs: int, batch_size: int, seed: int
    ) -> None:
        if epochs < 1 or batch_size < 1:
            raise ConfigError(f"got {epochs=} and {batch_size=}, expected both to be at least 1")
        told = read_conversations(conversations)
        self.new = [one for one in told if isinstance(one, Trajectory)]
        self.ids = [one if isinstance(one, str) else one.id for one in told]
        self._asked: list[Any] = [self.ids, epochs, batch_size, seed]
        self.batches: list[list[str]] = []
        for epoch in range(epochs):
            order = list(self.ids)
            random.Random(f"{seed}:{epoch}").shuffle(order)
            count = math.ceil(len(order) / batch_size)
            self.batches += [order[i * batch_size : (i + 1) * batch_size] for i in range(count)]

    def digest(self, policy: str, config: SFTConfig) -> str:
        """Of all that decides what is learned, and in which order."""
        asked = json.dumps([policy, *self._asked, config.model_dump(mode="json")], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()


class WarmStartFile:
    """``warm_start.json`` under a directory.

    Args:
        directory: made if it is missing.
        fresh: the state to begin with.
        resume: go on with what is there. False: put it aside (``warm_start.json.<id>``).

    Raises:
        ConfigError: the directory holds another warm start, or a broken file.
    """

    def __init__(self, directory: Path, fresh: WarmStart, *, resume: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "warm_start.json"
        found = self._read()
        if found is not None and not resume:
            self.path.rename(self.path.with_name(f"{self.path.name}.{found.id}"))
            found = None
        if found is not None and found.digest != fresh.digest:
            raise ConfigError(
                f"{self.path} is of another warm start ({found.policy}, {found.conversations} "
                "conversations): the conversations, their order or the config differ. Choose "
                "another out_dir, or pass resume=False."
            )
        self.state = found or fresh

    def save(self, **changes: Any) -> None:
        """Change the state; when this returns, it is on disk."""
        self.state = self.state.model_copy(update=changes)
        temporary = self.path.with_name(f".{self.path.name}.new")
        with temporary.open("w") as file:
            file.write(self.state.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)

    def _read(self) -> WarmStart | None:
        if not self.path.exists():
            return None
        try:
            return WarmStart.model_validate_json(self.path.read_bytes())
        except ValidationError as error:
            raise ConfigError(
                f"{self.path} cannot be read: {error}. Delete it, or choose another out_dir."
            ) from error


def begun(policy: str, shown: Demonstrations, config: SFTConfig) -> WarmStart:
    """A warm start of which nothing is done."""
    return WarmStart(
        id=uuid.uuid4().hex[:12],
        policy=policy,
        digest=shown.digest(policy, config),
        conversations=len(shown.ids),
    )


async def warm_start(
    client: AsyncArtClient,
    shown: Demonstrations,
    config: SFTConfig,
    file: WarmStartFile,
    display: Display,
) -> WarmStart:
    """Order the steps that are not done yet, one after the other.

    Raises:
        JobFailed: the server could not train; the adapter is unchanged by that step. Asked again,
            it is tried anew.
    """
    file.save()
    await _store(client, shown.new)
    policy, total = file.state.policy, len(shown.batches)
    with display.bar("warm start", total, len(file.state.results)) as advance:
        for step in range(len(file.state.results), total):
            key = file.state.key(step)
            try:
                job = await client.sft(shown.batches[step], policy, config, key)
                result = await client.wait(job)
            except JobFailed:
                tries = file.state.failed.get(step, 0) + 1
                file.save(failed=file.state.failed | {step: tries})
                raise
            file.save(results=(*file.state.results, result))
            _tell(display, result, step + 1, total)
            advance()
    return file.state


async def _store(client: AsyncArtClient, new: Sequence[Trajectory]) -> None:
    parts = [tuple(new[start : start + AT_ONCE]) for start in range(0, len(new), AT_ONCE)]
    await client.post_groups(
        [TrajectoryGroup(id="conversations", trajectories=part) for part in parts]
    )


def _tell(display: Display, result: TrainResult, step: int, total: int) -> None:
    loss = f"loss {result.metrics['loss']:.3f}  " if "loss" in result.metrics else ""
    tokens = result.metrics.get("tokens_trained", 0.0)
    version = f"{result.policy}@{result.version}"
    place = f"{step:>{len(str(total))}}/{total}"
    display.line(f"warm start {place}  {loss}{tokens:.0f} tokens  {version}")
    if result.excluded:
        left_out = ", ".join(f"{why} {count}" for why, count in sorted(result.excluded.items()))
        display.line(f"  left out: {left_out}")
    if not tokens:
        display.warn("  nothing was learned from in this step")
