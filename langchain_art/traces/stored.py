"""A trace as it was stored, whoever stored it; and what the server knows of it and of its run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from langchain_art.errors import NotFound
from langchain_art.export.brief import was_cut
from langchain_art.tracing.message_log import jsonable
from langchain_art.wire import ID, CallTags, Message, Reward, Status, Trajectory, Turn, Usage
from langchain_art.wire.identifiers import MAX_REWARD
from langchain_art.wire.redaction import REDACTED

if TYPE_CHECKING:
    from langchain_art.client.sync_client import ArtClient


class Unreadable(Exception):
    """A trace that cannot be read; its only argument is a key of `REASONS`."""


@dataclass(frozen=True)
class StoredCall:
    """One model call."""

    messages: Sequence[Message]
    reply: Message
    """Empty: there is none."""
    tools: Sequence[dict[str, Any]] = ()
    call_id: str | None = None
    """The completion's id, if the trace has it."""
    model: str | None = None
    node: str | None = None
    excluded_because: str | None = None
    """Reason for which the graph discarded the reply (`Turn.excluded_because`); None: it did not,
    or the store does not tell."""
    usage: Usage | None = None
    started_at: float | None = None
    latency: float | None = None
    error: str | None = None
    is_chat: bool = True
    """False: the prompt or the reply has another shape, and is left out."""

    def turn(self, *, ours: bool = False) -> Turn:
        """The call as the store shows it."""
        return Turn(
            call_id=self.call_id,
            node=self.node,
            model=self.model,
            messages=tuple(self.messages),
            tools=tuple(self.tools),
            reply=self.reply or None,
            usage=self.usage,
            started_at=self.started_at,
            latency=self.latency,
            ours=ours,
            excluded_because=self.excluded_because,
            error=self.error,
        )


@dataclass(frozen=True)
class StoredTrace:
    """One run of a graph."""

    id: str
    """The store's."""
    input: Any
    calls: Sequence[StoredCall]
    output: Any = None
    run: str | None = None
    """The id of the run that it shows (`Trajectory.id`), if langchain-art exported it."""
    scenario: str | None = None
    score: float | None = None
    """The mean of what people gave it."""
    failed: bool = False
    error: str | None = None


def score_of(given: Sequence[Any]) -> float | None:
    """The mean of what people gave a run; None: nothing. Raises Unreadable ("no_score")."""
    try:
        numbers = [float(one) for one in given]
    except (TypeError, ValueError, OverflowError) as error:
        raise Unreadable("no_score") from error
    if not all(abs(one) <= MAX_REWARD for one in numbers):  # NaN is not
        raise Unreadable("no_score")
    return fmean(numbers) if numbers else None


@dataclass
class Read:
    """Traces that a store gave, and how many could not be read, by reason (`REASONS`)."""

    traces: list[StoredTrace] = field(default_factory=list[StoredTrace])
    unreadable: dict[str, int] = field(default_factory=dict[str, int])

    def leave_out(self, reason: str) -> None:
        """Count a trace that cannot be read."""
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
            records={one["id"]: one for one in recorded},
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
                    _turn(call, about.records.get(call.call_id or "")) for call in trace.calls
                ),
                input=_whole(trace.input),
                output=_whole(trace.output),
                status=status,
                metadata={"imported": {"store": store, "trace": trace.id}},
            )
        )
    return run


def _turn(call: StoredCall, record: Mapping[str, Any] | None) -> Turn:
    if record is None:
        return call.turn()
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
