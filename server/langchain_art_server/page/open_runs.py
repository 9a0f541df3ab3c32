"""Runs of which calls were recorded, and which are not stored: most of them still run."""

from __future__ import annotations

import time

import sqlalchemy as sa
from pydantic import BaseModel

from langchain_art.wire import CallTags
from langchain_art_server.storage.tables import CALLS, TRAJECTORIES

#: Seconds since its last call for which a run is listed, the newest calls that are looked at, and
#: the most runs that are listed.
OPEN_SECONDS, _AMONG, _LISTED = 600.0, 2000, 50
#: Bytes of a token's number.
_TOKEN = 4


class OpenRun(BaseModel):
    """A run that has not been stored."""

    id: str
    scenario: str | None
    node: str | None
    """Node of its last call."""
    calls: int
    tokens: int
    """Sampled tokens."""
    seconds: float
    """Seconds from the first call's start to the last one's end."""
    last_at: float
    """End of its last call: seconds since the epoch."""
    models: list[str]


class OpenRuns(BaseModel):
    """Runs that have not been stored, the latest first."""

    runs: list[OpenRun]


def read_open_runs(connection: sa.Connection) -> OpenRuns:
    """The runs whose last call is no older than `OPEN_SECONDS`.

    They still run, wait for the other runs of their group or step, or are never sent.
    """
    newest = connection.scalar(sa.select(sa.func.max(CALLS.c.number))) or 0
    stored = sa.select(TRAJECTORIES.c.id).where(TRAJECTORIES.c.id == CALLS.c.trajectory_id)
    columns = (CALLS.c.trajectory_id, CALLS.c.tags, CALLS.c.model, CALLS.c.created_at)
    query = (
        sa.select(*columns, CALLS.c.latency, sa.func.length(CALLS.c.token_ids).label("size"))
        .where(CALLS.c.number > newest - _AMONG, CALLS.c.trajectory_id.is_not(None))
        .where(CALLS.c.created_at >= time.time() - OPEN_SECONDS, ~stored.exists())
        .order_by(CALLS.c.number.desc())
    )
    found: dict[str, OpenRun] = {}
    for row in connection.execute(query):
        begun = row.created_at - row.latency
        run = found.get(row.trajectory_id)
        if run is None:
            if len(found) == _LISTED:
                continue
            tags = CallTags.model_validate_json(row.tags)
            run = found[row.trajectory_id] = OpenRun(
                id=row.trajectory_id,
                scenario=tags.scenario,
                node=tags.node,
                calls=0,
                tokens=0,
                seconds=0.0,
                last_at=row.created_at,
                models=[],
            )
        run.calls += 1
        run.tokens += row.size // _TOKEN
        run.seconds = max(run.seconds, run.last_at - begun)
        if row.model not in run.models:
            run.models.append(row.model)
    return OpenRuns(runs=list(found.values()))
