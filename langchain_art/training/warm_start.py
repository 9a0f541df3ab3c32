"""A supervised warm start: its steps, run by `Trainer.warm_start`, and the file it resumes from."""

from __future__ import annotations

import hashlib
import json
import random
import uuid
from pathlib import Path
from typing import Any

from pydantic import Field

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.client.conversations import Conversations, read_conversations, to_post
from langchain_art.errors import ConfigError, JobFailed
from langchain_art.rollout.scenarios import check_count
from langchain_art.training.fit_state import read_state, write_state
from langchain_art.training.learning_rates import choose_rate
from langchain_art.training.progress import Display
from langchain_art.training.report import counts, overflowed
from langchain_art.wire import SFTConfig, TrainResult
from langchain_art.wire.identifiers import Frozen

_FILE = "warm_start.json"


class WarmStart(Frozen):
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

    @property
    def losses(self) -> list[float]:
        """Mean negative log-likelihood of each step's tokens before it, in nats."""
        return [result.metrics["loss"] for result in self.results if "loss" in result.metrics]

    @property
    def version(self) -> int | None:
        """The version that the last step made; None before the first."""
        return self.results[-1].version if self.results else None

    def key(self, step: int) -> str:
        """The idempotency key of a step's job, so that no step is trained twice."""
        attempt = self.failed.get(step, 0)
        return f"{self.id}:sft:{step}" + (f":{attempt + 1}" if attempt else "")


def warm_version(directory: Path) -> dict[str, int]:
    """A folder's warm start: its policy -> the version that it has come to; empty without one."""
    found = read_state(directory / _FILE, WarmStart)
    return {} if found is None else {found.policy: found.version or 0}


class WarmStartRun:
    """The steps of a warm start; arguments and errors as of `Trainer.warm_start`.

    The last batch of an epoch may have fewer conversations; `seed` is of the order, which differs
    in each epoch.
    """

    def __init__(
        self,
        directory: Path,
        policy: str,
        conversations: Conversations,
        config: SFTConfig,
        *,
        epochs: int,
        batch_size: int,
        seed: int,
        fresh: bool,
    ) -> None:
        epochs = check_count(epochs, "epochs", 1)
        batch_size = check_count(batch_size, "batch_size", 1)
        read = read_conversations(conversations)
        ids = [one if isinstance(one, str) else one.id for one in read]
        self._new = to_post(read)
        self._config = config
        self._batches: list[list[str]] = []
        for epoch in range(epochs):
            order = list(ids)
            random.Random(f"{seed}:{epoch}").shuffle(order)
            starts = range(0, len(order), batch_size)
            self._batches += [order[start : start + batch_size] for start in starts]
        asked = [policy, ids, epochs, batch_size, seed, config.model_dump(mode="json")]
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / _FILE
        found = read_state(self._path, WarmStart)
        self._former = found.id if found is not None and fresh else None
        found = None if fresh else found
        if found is not None and found.digest != digest:
            raise ConfigError(
                f"{self._path} is of another warm start ({found.policy}, {found.conversations} "
                "conversations): the conversations, their order or the config differ. Choose "
                "another out_dir: it goes on from what the policy has learned. Or begin anew from "
                "the base with warm_start(…, fresh=True)."
            )
        self._state = found or WarmStart(
            id=uuid.uuid4().hex[:12], policy=policy, digest=digest, conversations=len(ids)
        )

    async def run(self, client: AsyncArtClient, display: Display, serving: int) -> WarmStart:
        """Run the steps that are not done yet, in order; JobFailed leaves one for the next call.

        `serving` is the policy's version. With `fresh`, it was rolled back before.
        """
        if serving < (self._state.version or 0):
            raise ConfigError(
                f"The server serves {self._state.policy}@{serving}, but the warm start in "
                f"{self._path} had come to @{self._state.version}: the policy was rolled back, or "
                "this is another server. Begin anew from the base with warm_start(…, fresh=True), "
                "or choose another out_dir to go on from what is served."
            )
        if self._former is not None:
            earlier = self._path.parent / "earlier" / self._former
            earlier.mkdir(parents=True, exist_ok=True)
            self._path.rename(earlier / self._path.name)
            self._former = None
        self._save()
        await client.post_groups(self._new)
        rate = await choose_rate(client, [self._state.policy], self._config, display)
        config = self._config.model_copy(update={"learning_rate": rate})
        done, total = len(self._state.results), len(self._batches)
        with display.bar("warm start", total, done) as advance:
            for step in range(done, total):
                state = self._state
                try:
                    job = await client.sft(
                        self._batches[step],
                        state.policy,
                        config,
                        state.key(step),
                        schedule_step=step + 1,
                    )
                    result = await client.wait(job)
                except JobFailed:
                    tries = state.failed.get(step, 0) + 1
                    self._save(failed=state.failed | {step: tries})
                    raise
                self._save(results=(*state.results, result))
                _print_step(display, result, step + 1, total)
                advance()
        return self._state

    def _save(self, **changes: Any) -> None:
        self._state = self._state.model_copy(update=changes)
        write_state(self._path, self._state)


def _print_step(display: Display, result: TrainResult, step: int, total: int) -> None:
    loss = f"loss {result.metrics['loss']:.3f}  " if "loss" in result.metrics else ""
    tokens = result.metrics.get("tokens_trained", 0.0)
    version = f"{result.policy}@{result.version}"
    place = f"{step:>{len(str(total))}}/{total}"
    display.line(f"warm start {place}  {loss}{tokens:.0f} tokens  {version}")
    if result.excluded:
        display.line(f"  excluded: {counts(result.excluded)}")
    for line in overflowed(result):
        display.warn(line)
    if not tokens:
        display.warn("  nothing was learned from in this step")
