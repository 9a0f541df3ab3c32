"""Runs of a `RemoteGraph`: the server assembles trajectories from calls tagged with the run's id.

Callbacks do not reach a graph on another machine. Its `ChatART` tags its calls with the run id from
the run's config, so the server has the turns: they are fetched for the evaluator and scored there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from langchain_art.client.async_client import AsyncArtClient
from langchain_art.errors import ConfigError, NotFound
from langchain_art.wire import NOT_HEARD, Reward, Trajectory, TrajectoryGroup

_AT_ONCE = 16


async def fetch(client: AsyncArtClient, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """The groups with the turns that the server has; a ConfigError if it has none at all."""
    known = await _put(client, groups)
    runs = [run for group in groups for run in group.trajectories if run.status != "failed"]
    if runs and not any(run.id in known for run in runs):
        raise ConfigError(
            f"No model call of {len(runs)} runs of the remote graph bears its run's id. Let its "
            "nodes call a ChatART of this server; a graph that does not hand its config on (a "
            "thread without a context, say) must be run by a function instead."
        )

    def whole(run: Trajectory) -> Trajectory:
        turns = known.get(run.id, run).turns
        return run.model_copy(update={"turns": turns, "metadata": _heard(run.metadata)})

    return [
        group.model_copy(update={"trajectories": tuple(map(whole, group.trajectories))})
        for group in groups
    ]


async def score(client: AsyncArtClient, groups: Sequence[TrajectoryGroup]) -> list[list[str]]:
    """Send the rewards; returns the ids of the runs that the server has, group by group."""
    known = await _put(client, groups)
    ids = [[run.id for run in group.trajectories if run.id in known] for group in groups]
    return [group for group in ids if group]


async def _put(client: AsyncArtClient, groups: Sequence[TrajectoryGroup]) -> dict[str, Trajectory]:
    slots = asyncio.Semaphore(_AT_ONCE)

    async def put(run: Trajectory) -> Trajectory | None:
        scored = Reward(
            reward=run.reward,
            turns={t.call_id: t.reward for t in run.turns if t.call_id and t.reward is not None},
            scores=run.scores,
            metadata=_heard(run.metadata),
            scenario=run.scenario,
            status=run.status,
        )
        async with slots:
            try:
                return await client.reward(run.id, scored)
            except NotFound:  # the run made no call
                return None

    found = await asyncio.gather(*(put(run) for group in groups for run in group.trajectories))
    return {run.id: run for run in found if run is not None}


def _heard(metadata: dict[str, Any]) -> dict[str, Any]:
    """A run's metadata without the note on unrecorded calls, since the server recorded them."""
    return {key: value for key, value in metadata.items() if key != NOT_HEARD}
