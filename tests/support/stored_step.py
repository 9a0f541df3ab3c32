"""One training step in this process, with real engines, on a copy of a data directory.

Crashes and failures are put before any of its operations on files (`tests.support.operations`) and
transactions of the database.
"""

import asyncio
import hashlib
import shutil
import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from langchain_art.wire import TrainConfig, TrainJob, TrainRequest
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.config import Settings, load_settings
from langchain_art_server.gateway.health import Health
from langchain_art_server.gateway.keys.tenants import TenantSampler
from langchain_art_server.gateway.service import Service
from langchain_art_server.storage.database import Database
from tests.support.live_server import ForkedServer, small_model
from tests.support.operations import Operations
from tests.support.steps_of_a_fit import rewarded, trained

#: A database's own files: what SQLite does to them is SQLite's.
DATABASE = (".sqlite3", ".sqlite3-wal", ".sqlite3-shm", "lock")
#: Runs of the two steps that are made already, and of each of the two that are to be made.
RATE = 2e-5
FORMER = tuple(tuple(f"former-{n}-{seed}" for seed in range(4)) for n in range(2))
STEPS = tuple(tuple(f"step-{n}-{seed}" for seed in range(4)) for n in range(2))


class Crash(BaseException):
    """The machine has stopped: nothing is written from here on."""


def stored(folder: Path) -> Path:
    """A data directory with the versions 0, 1 and 2 of a policy, and runs for two more steps.

    Of its versions the newest is kept, beside the first and the one that serves.
    """
    with (
        ForkedServer(folder / "data", settings="keep_checkpoints = 1\n") as server,
        server.http() as http,
    ):
        for step, runs in enumerate((*FORMER, *STEPS)):
            for seed, run in enumerate(runs):
                rewarded(http, run, float(seed % 2), max_tokens=8, seed=seed)
            if runs in FORMER:
                config = {"learning_rate": RATE}
                done = trained(http, [runs], key=f"former-{step}", config=config)
                assert done["state"] == "succeeded", done
    return folder / "data"


class RememberedSteps:
    """The learner, which computes each step once: the same step gives the same bytes."""

    def __init__(self, learner: PeftLearner, folder: Path) -> None:
        self._learner, self._folder = learner, folder
        self._known: dict[str, tuple[dict[str, float], Path]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    async def start(self) -> None:
        """Nothing: it is started."""

    async def close(self) -> None:
        """Nothing: it goes on."""

    async def step(self, request: LearnerStep, on_progress: Any) -> dict[str, float]:
        found = hashlib.sha256()
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            if (request.parent / file).exists():
                found.update((request.parent / file).read_bytes())
        found.update(repr((request.rows, request.config, request.step)).encode())
        if (key := found.hexdigest()) not in self._known:
            kept = self._folder / key
            kept.mkdir(parents=True)
            metrics = await self._learner.step(replace(request, out=kept), on_progress)
            self._known[key] = metrics, kept
        metrics, kept = self._known[key]
        for file in sorted(kept.iterdir()):
            (request.out / file.name).write_bytes(file.read_bytes())
        return dict(metrics)


class Steps:
    """Makes steps of a server's, each on a copy of its data directory."""

    def __init__(
        self,
        data: Path,
        folder: Path,
        sampler: TransformersSampler,
        learner: PeftLearner,
        patch: pytest.MonkeyPatch,
    ) -> None:
        self.data, self._folder, self._sampler = data, folder, sampler
        self._learner = RememberedSteps(learner, folder / "learned")
        self._made = 0
        self.operations: Operations | None = None
        transact = Database._transact

        def noted(database: Database, work: Callable[[Any], Any]) -> Any:
            if self.operations is not None:
                try:
                    self.operations.note("transaction")
                except OSError as error:
                    return transact(database, _failing(error))
            return transact(database, work)

        async def not_at_all(_health: Health) -> None: ...

        patch.setattr(Database, "_transact", noted)
        patch.setattr(Health, "_probe_for_ever", not_at_all)  # its transactions come at any time

    def copy(self) -> Path:
        """A copy of the data directory."""
        self._made += 1
        return Path(shutil.copytree(self.data, self._folder / f"copy-{self._made}"))

    def free_place(self) -> Path:
        """Where a data directory can be written."""
        self._made += 1
        return self._folder / f"made-{self._made}"

    @asynccontextmanager
    async def service(self, data: Path) -> AsyncGenerator[Service]:
        """A server on a data directory, without HTTP. It may be crashed inside."""
        self._made += 1
        sampler = TenantSampler(self._sampler, f"run{self._made}")
        made = Service(settings(data), sampler, self._learner)  # type: ignore[arg-type]
        try:
            await made.start()
            yield made
        finally:
            self.operations = None
            with suppress(Crash):
                await made.jobs.close()
            for watch in made._watch:
                watch.cancel()
            for name in list(made.router._loaded):
                await sampler.unload_adapter(name)
            made.store.close()
            made._lock.close()


def _failing(error: OSError) -> Callable[[Any], Any]:
    """What fails as SQLite does on a full disk, or on one that does not write."""

    def fail(_connection: Any) -> None:
        raise OperationalError("", {}, sqlite3.OperationalError(str(error)))

    return fail


def settings(data: Path) -> Settings:
    """Of the server that `stored` starts."""
    return load_settings(
        None, model=str(small_model()), data_dir=data, keep_checkpoints=1, policies=("tiny",)
    )


@asynccontextmanager
async def steps(data: Path, folder: Path, patch: pytest.MonkeyPatch) -> AsyncGenerator[Steps]:
    """Real engines, and steps that they make."""
    sampler, learner = TransformersSampler(settings(data)), PeftLearner(settings(data))
    await asyncio.gather(sampler.start(), learner.start())
    try:
        yield Steps(data, folder, sampler, learner, patch)
    finally:
        await asyncio.gather(sampler.close(), learner.close())


async def submit(service: Service, step: int) -> TrainJob:
    """Send a step, as a client that sends it until it is acknowledged."""
    request = TrainRequest(
        policy="tiny", groups=(STEPS[step],), config=TrainConfig(learning_rate=RATE)
    )
    return await service.train(request, f"step-{step}")


async def ended(service: Service, job: TrainJob) -> TrainJob:
    """The job as it ended."""
    async with asyncio.timeout(60):
        while not (found := await service.store.jobs.get(job.id)).ended:
            await asyncio.sleep(0.005)
    return found


def learned(data: Path, version: int) -> list[bytes]:
    """What a version's weights, its optimizer's state and its config are."""
    folder = data / "adapters" / "tiny" / str(version)
    names = ("adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json")
    return [(folder / name).read_bytes() for name in names]
