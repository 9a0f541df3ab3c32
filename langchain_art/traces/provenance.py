"""Which of a trace's calls the server has recorded, and how old the versions are that answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_art.errors import NotFound
from langchain_art.traces.stored import StoredTrace
from langchain_art.wire import Trajectory

if TYPE_CHECKING:
    from langchain_art.client.sync_client import ArtClient


@dataclass(frozen=True)
class Provenance:
    """What the server knows of a trace."""

    run: str | None
    """The id of its run, by the trace or by the tags of its calls."""
    stored: Trajectory | None
    """The run, if it is stored as a trajectory."""
    tagged: bool
    """Whether its calls are tagged with the run's id, so that the server can assemble it."""
    known: frozenset[str]
    """Ids of the calls that a policy of the server answered."""
    staleness: int | None
    """Versions that the oldest of them is behind; None: there is none, or the policy is gone."""


class Recorder:
    """Looks traces up at a server, whose policies are read once."""

    def __init__(self, client: ArtClient) -> None:
        self._client = client
        self._serving = {one.name: one.version for one in client.policies()}

    def look_up(self, trace: StoredTrace) -> Provenance:
        """What the server knows of a trace."""
        recorded: list[dict[str, Any]] = []
        for call in trace.calls:
            if call.call_id is not None and (found := self._call(call.call_id)) is not None:
                recorded.append(found)
        tags = {one["tags"].get("trajectory_id") for one in recorded} - {None}
        run = trace.run or (next(iter(tags)) if len(tags) == 1 else None)
        ours = [one for one in recorded if one["policy"] is not None]
        return Provenance(
            run=run,
            stored=None if run is None else self._run(run),
            tagged=run in tags,
            known=frozenset(one["id"] for one in ours),
            staleness=self._staleness(ours),
        )

    def _staleness(self, ours: Sequence[dict[str, Any]]) -> int | None:
        if not ours or any(one["policy"] not in self._serving for one in ours):
            return None
        return max(self._serving[one["policy"]] - one["version"] for one in ours)

    def _call(self, call: str) -> dict[str, Any] | None:
        try:
            return self._client.call(call)
        except NotFound:
            return None

    def _run(self, run: str) -> Trajectory | None:
        try:
            return self._client.trajectory(run)
        except NotFound:
            return None
