"""Choice of where the runs of a fit or an evaluation are made: here, or by workers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ConfigError, RolloutFailed
from langchain_art.ray import RayWorkers, require_ray
from langchain_art.rollout.names import rollout_name
from langchain_art.rollout.queued_runs import QueuedRuns
from langchain_art.rollout.run_source import RunSource
from langchain_art.rollout.runner import Rollout, RolloutWorker
from langchain_art.rollout.scenarios import draw
from langchain_art.tracing.run import Run
from langchain_art.training.fit_settings import FitSettings
from langchain_art.training.progress import Display
from langchain_art.wire import Trajectory
from langchain_art.wire.identifiers import scenario_id

_ON_RAY = "Those on the Ray cluster are being started; where one has no room, that is said."


@asynccontextmanager
async def own_workers(
    plan: FitSettings, client: AsyncArtClient, display: Display, rollout: Rollout | str
) -> AsyncGenerator[None, None]:
    """The workers that a fit has of its own, on a Ray cluster; none, if `plan` asks for none.

    Raises:
        ConfigError: Ray is not installed, its cluster cannot be joined, or cannot reach the server.
    """
    if plan.workers is None or plan.workers == "server":
        yield
        return
    require_ray()
    from langchain_art.ray.worker_pool import worker_pool  # noqa: PLC0415 - Ray

    chosen = RayWorkers() if plan.workers == "ray" else plan.workers
    where = (rollout_name(rollout), client.base_url, client.api_key)
    async with worker_pool(chosen, *where, plan.concurrency, display.warn):
        yield


async def try_out(
    plan: FitSettings,
    client: AsyncArtClient,
    display: Display,
    rollout: Rollout | str,
    scenarios: Sequence[Any],
) -> None:
    """Run `rollout` until one run works, on as many scenarios as a group has runs at most.

    Nothing is run if there is no scenario.

    Raises:
        RolloutFailed: none does, or more raise than `FitSettings.max_failed` of a group.
    """
    if not len(scenarios):
        return
    source = run_source(
        plan,
        client,
        display,
        rollout,
        uuid.uuid4().hex,
        on_done=lambda _: None,
        on_run=None,
    )
    source.expect(plan.group_size)
    try:
        for place in range(plan.group_size):
            scenario = draw(scenarios, place, plan.seed)
            run = await source.run(scenario, scenario_id(scenario))
            if run.status != "failed":
                return
        raise RolloutFailed(f"{plan.group_size} runs raised. The first: {source.first_error}.")
    finally:
        await source.close()


def run_source(
    plan: FitSettings,
    client: AsyncArtClient,
    display: Display,
    rollout: Rollout | str,
    batch: str,
    *,
    on_done: Callable[[Trajectory], None],
    on_run: Callable[[Run], None] | None,
) -> RunSource:
    """Source of the runs, as `plan` says.

    Args:
        plan: of the fit.
        client: of the server.
        display: informed that no worker is there, and that the server is away.
        rollout: what is run.
        batch: id under which workers get the runs.
        on_done: as of `gather`.
        on_run: as of `gather`; not called for runs of workers.

    Raises:
        ConfigError: the rollout is none that can be run there.
    """
    if plan.workers is not None:
        return QueuedRuns(
            client,
            rollout_name(rollout),
            batch,
            max_failed=plan.max_failed,
            on_done=on_done,
            warn=display.warn,
            advice=None if plan.workers == "server" else _ON_RAY,
        )
    if isinstance(rollout, str):
        raise ConfigError(f"got the rollout {rollout!r}, expected a function")
    return RolloutWorker(
        rollout,
        plan.concurrency,
        on_done=on_done,
        ready=client.ready,
        max_failed=plan.max_failed,
        on_run=on_run,
        server=client.base_url,
        say=display.line,
    )
