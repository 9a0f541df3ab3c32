"""A trace as it was stored, whoever stored it; and what the server knows of it and of its run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ParamSpec

from langchain_art.client.sync_client import ArtClient, found_or_none
from langchain_art.export.brief import was_cut
from langchain_art.tracing.message_log import jsonable
from langchain_art.wire import ID, CallTags, Reward, Status, Trajectory, Turn, Usage
from langchain_art.wire.identifiers import MAX_REWARD, scenario_id
from langchain_art.wire.redaction import REDACTED

P = ParamSpec("P")


class Unreadable(Exception):
    """A trace that cannot be read; its only argument is a key of `REASONS`."""


@dataclass(frozen=True)
class StoredTrace:
    """One run of a graph."""

    id: str
    """The store's."""
    input: Any
    calls: Sequence[Turn]
    """Model calls as the store shows them, each with its whole prompt."""
    output: Any = None
    run: str | None = None
    """The id of the run that it shows (`Trajectory.id`), if langchain-art exported it."""
    scenario: str | None = None
    score: float | None = None
    """The mean of what people gave it."""
    failed: bool = False


def score_of(given: Sequence[Any]) -> float | None:
    """The mean of what people gave a run; None: nothing. Raises Unreadable ("no_score")."""
    try:
        numbers = [float(one) for one in given if one is not None]
    except (TypeError, ValueError, OverflowError) as error:
        raise Unreadable("no_score") from error
    if not all(abs(one) <= MAX_REWARD for one in numbers):  # NaN is not
        raise Unreadable("no_score")
    return fmean(numbers) if numbers else None


def scenario_of(given: Any) -> str | None:
    """The name of the scenario that a line says: a text or a number, or the scenario itself."""
    if given is None:
        return None
    return scenario_id(given if isinstance(given, Mapping) else {"id": given})


@dataclass
class Read:
    """Traces that a store gave, and how many could not be read, by reason (`REASONS`)."""

    traces: list[StoredTrace] = field(default_factory=list[StoredTrace])
    unreadable: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, make: Callable[P, StoredTrace], *args: P.args, **kwargs: P.kwargs) -> None:
        """Add the trace that `make` makes of these arguments, or count why it cannot be read."""
        try:
            self.traces.append(make(*args, **kwargs))
        except (Unreadable, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = str(error) if isinstance(error, Unreadable) else "unknown_shape"
            self.unreadable[reason] = self.unreadable.get(reason, 0) + 1


#: Why a trace is not read.
REASONS = {
    "no_calls": "have no model call",
    "no_root": "have no root: it is older than --since, or not visible yet",
    "no_score": f"have a score that is no finite number within ±{MAX_REWARD:g}",
    "unknown_shape": "have a prompt or a reply that is no chat message",
}


@dataclass(frozen=True)
class Provenance:
    """Facts that the server knows of a trace."""

    run: str | None
    """The id of its run, by the trace or by the tags of its calls."""
    stored: Trajectory | None
    tagged: bool
    """True if its calls are tagged with the run's id, so that the server can assemble it."""
    records: Mapping[str, Mapping[str, Any]]
    staleness: int | None
    """Versions that the oldest call of a policy is behind; None: there is none, or the policy is
    gone."""

    @property
    def known(self) -> bool:
        """True if a policy of the server answered one of the calls."""
        return any(one["policy"] is not None for one in self.records.values())


class Recorder:
    """Looks traces up at a server, whose policies are read once."""

    def __init__(self, client: ArtClient) -> None:
        self._client = client
        self._serving = {one.name: one.version for one in client.policies()}

    def look_up(self, trace: StoredTrace) -> Provenance:
        """Look up what the server knows of a trace."""
        client, ids = self._client, [call.call_id for call in trace.calls if call.call_id]
        recorded = [one for id_ in ids if (one := found_or_none(client.call, id_)) is not None]
        tags = {one["tags"].get("trajectory_id") for one in recorded} - {None}
        run = trace.run or (next(iter(tags)) if len(tags) == 1 else None)
        ours = [one for one in recorded if one["policy"] is not None]
        return Provenance(
            run=run,
            stored=None if run is None else found_or_none(client.trajectory, run),
            tagged=run in tags,
            records={one["id"]: one for one in recorded},
            staleness=self._staleness(ours),
        )

    def _staleness(self, ours: Sequence[dict[str, Any]]) -> int | None:
        if not ours or any(one["policy"] not in self._serving for one in ours):
            return None
        return max(self._serving[one["policy"]] - one["version"] for one in ours)


def keep_run(client: ArtClient, trace: StoredTrace, about: Provenance, store: str) -> str:
    """Make sure that the server has the run of a trace, which is in `store`; returns the run's id.

    Its calls are those of the trace. Each is written as the server recorded it, since an exported
    text may be redacted; a call that the server has not is shown as the trace has it.
    """
    run = about.run or safe_id(trace.id)
    status: Status = "failed" if trace.failed else "completed"
    if about.stored is None and trace.run is None and about.tagged:
        client.reward(run, Reward(status=status))  # assembles it: the trace may show a part
    elif about.stored is None:
        client.post_trajectory(
            Trajectory(
                id=run,
                scenario=trace.scenario,
                turns=tuple(
                    _turn(one, about.records.get(one.call_id or "")) for one in trace.calls
                ),
                input=_whole(trace.input),
                output=_whole(trace.output),
                status=status,
                metadata={"imported": {"store": store, "trace": trace.id}},
            )
        )
    return run


def _turn(call: Turn, record: Mapping[str, Any] | None) -> Turn:
    if record is None:
        return call
    tags = CallTags.model_validate(record["tags"])
    asked, said = len(record["prompt_token_ids"]), len(record["token_ids"])
    return Turn(
        **tags.of_turn(),
        call_id=call.call_id,
        excluded_because=call.excluded_because,
        model=record["model"],
        messages=tuple(record["request"]["messages"]),
        tools=tuple(record["request"].get("tools") or ()),
        reply=record["reply"],
        usage=Usage(prompt_tokens=asked, completion_tokens=said),
        started_at=record["created_at"] - record["latency"],
        latency=record["latency"],
    )


def _whole(value: Any) -> Any:
    """Input or output of a run as JSON; None where it was shortened or redacted."""
    return None if was_cut(value) or is_redacted(value) else jsonable(value)


def is_redacted(value: Any) -> bool:
    """True if a secret was taken out of it when it was exported."""
    return REDACTED in json.dumps(jsonable(value), ensure_ascii=False)


def safe_id(name: str) -> str:
    """The name, if it may be an id; else a hash of it."""
    return name if ID.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:32]
