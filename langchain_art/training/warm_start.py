"""A supervised warm start: its steps, run by `Trainer.warm_start`, and the file it resumes from."""

from __future__ import annotations

import hashlib
import json
import math
import random
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.conversations import Conversations, read_conversations
from langchain_art.errors import ConfigError, JobFailed
from langchain_art.training.fit_state import read_state, write_state
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
    """Hash of the conversations, their order and the config."""
    conversations: int
    failed: dict[int, int] = Field(default_factory=dict)
    """step -> number of failed jobs; each attempt needs a new idempotency key."""
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
        """The idempotency key of a step's job, so that no step is trained twice."""
        attempt = self.failed.get(step, 0)
        return f"{self.id}:sft:{step}" + (f":{attempt + 1}" if attempt else "")


class Demonstrations:
    """Conversations in the order in which they are trained.

    Args:
        conversations: see `conversations.read_conversations`.
        epochs: how often each is trained.
        batch_size: conversations per step; the last of an epoch may have fewer.
        seed: of the order, which differs in each epoch.

    Raises:
        ConfigError: a number is below 1, or a conversation is malformed.
    """

    def __init__(
        self, conversations: Conversations, epochs: int, batch_size: int, seed: int
    ) -> None:
        if epochs < 1 or batch_size < 1:
            raise ConfigError(f"got {epochs=} and {batch_size=}, expected both to be at least 1")
        read = read_conversations(conversations)
        self.new = [one for one in read if isinstance(one, Trajectory)]
        self.ids = [one if isinstance(one, str) else one.id for one in read]
        self._asked: list[Any] = [self.ids, epochs, batch_size, seed]
        self.batches: list[list[str]] = []
        for epoch in range(epochs):
            order = list(self.ids)
            random.Random(f"{seed}:{epoch}").shuffle(order)
            count = math.ceil(len(order) / batch_size)
            self.batches += [order[i * batch_size : (i + 1) * batch_size] for i in range(count)]

    def digest(self, policy: str, config: SFTConfig) -> str:
        """Hash of what is trained and in which order."""
        asked = json.dumps([policy, *self._asked, config.model_dump(mode="json")], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()


class WarmStartFile:
    """``warm_start.json`` under a directory.

    Args:
        directory: made if it is missing.
        fresh: the initial state.
        resume: continue what is there. False: rename the file to ``warm_start.json.<id>``.

    Raises:
        ConfigError: the directory holds another warm start, or a broken file.
    """

    def __init__(self, directory: Path, fresh: WarmStart, *, resume: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "warm_start.json"
        found = read_state(self.path, WarmStart)
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
        write_state(self.path, self.state)


def initial_state(policy: str, shown: Demonstrations, config: SFTConfig) -> WarmStart:
    """The state of a warm start with no step done."""
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
    """Run the steps that are not done yet, in order.

    Raises:
        JobFailed: the server could not train; the adapter is unchanged by that step, which the
            next call repeats.
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
            _print_step(display, result, step + 1, total)
            advance()
    return file.state


async def _store(client: AsyncArtClient, new: Sequence[Trajectory]) -> None:
    parts = [tuple(new[start : start + AT_ONCE]) for start in range(0, len(new), AT_ONCE)]
    await client.post_groups(
        [TrajectoryGroup(id="conversations", trajectories=part) for part in parts]
    )


def _print_step(display: Display, result: TrainResult, step: int, total: int) -> None:
    loss = f"loss {result.metrics['loss']:.3f}  " if "loss" in result.metrics else ""
    tokens = result.metrics.get("tokens_trained", 0.0)
    version = f"{result.policy}@{result.version}"
    place = f"{step:>{len(str(total))}}/{total}"
    display.line(f"warm start {place}  {loss}{tokens:.0f} tokens  {version}")
    if result.excluded:
        excluded = ", ".join(f"{why} {count}" for why, count in sorted(result.excluded.items()))
        display.line(f"  excluded: {excluded}")
    if not tokens:
        display.warn("  nothing was learned from in this step")
