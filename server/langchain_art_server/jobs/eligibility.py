"""Eligibility of a run's calls for training, and why others may not be trained.

Training and the audit both ask `check_eligibility`. The reasons are the words behind ``calls.`` in
`TrainResult.excluded`; `langchain_art.wire.training` has what each means. A call that an earlier
job trained may be trained again once a rollback has discarded what that job made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from langchain_art.credit.candidates import why_excluded
from langchain_art.wire import Trajectory, Turn
from langchain_art_server.storage.tables import CallRecord

#: Why a call's tokens are missing from the probability of its run.
MISSING = frozenset({"lost", "foreign", "too_long"})


@dataclass(frozen=True)
class CallEligibility:
    """A turn, its record if there is one, and why it is not trained (None: it is)."""

    turn: Turn
    record: CallRecord | None
    excluded_because: str | None

    @property
    def node(self) -> str:
        """Key in `TrainResult.nodes`."""
        return self.turn.label

    @property
    def policy(self) -> str | None:
        """Policy that sampled it, as far as is known; None: not one of this server."""
        if self.record is not None:
            return self.record.policy
        return (self.turn.model or "").partition("@")[0] if self.turn.ours else None


def check_eligibility(
    run: Trajectory,
    records: Mapping[str, CallRecord],
    policy: str | None,
    trainable: Mapping[str, bool],
    *,
    imitates: bool = False,
    trained: Collection[str] = (),
    learning: set[str] | None = None,
) -> list[CallEligibility]:
    """Check each turn of a run: whether it may be trained, and if not, why.

    Args:
        run: the run.
        records: its calls, by id.
        policy: the one that is trained; None: whichever sampled the turn.
        trainable: `TrainRequest.trainable`.
        imitates: a supervised step, for which it does not matter who sampled the call.
        trained: ids of the calls that earlier jobs trained.
        learning: ids of the calls of the batch's earlier runs that are trained; those of this run
            are added.
    """
    checked: list[CallEligibility] = []
    learning = set() if learning is None else learning
    for turn in run.turns:
        record = records.get(turn.call_id or "")
        sampled_by = None if record is None else record.policy or ""
        excluded_because = why_excluded(
            turn, sampled_by, policy, trainable, imitates=imitates
        ) or _why_excluded(record)
        if excluded_because is None and record is not None:
            if record.id in trained:
                excluded_because = "already_trained"
            elif record.id in learning:
                excluded_because = "repeated"
            learning.add(record.id)
        checked.append(CallEligibility(turn, record, excluded_because))
    return checked


def why_no_pair(sides: Sequence[Sequence[CallEligibility]]) -> Counter[str]:
    """Reason for which a pair is excluded, and the calls that cause it; empty: it is trained.

    Without the tokens of one reply a side's probability is not that of its replies, and would be
    compared with one that is: no part of such a pair is trained. Calls that the graph discarded, or
    that `trainable` does not choose, are left out of both sides alike.

    Args:
        sides: the calls of the chosen run, and those of the rejected one.
    """
    found: Counter[str] = Counter()
    chosen, rejected = learned = [sorted(_learned(judged)) for judged in sides]
    for judged, some in zip(sides, learned, strict=True):
        whys = (one.excluded_because for one in judged)
        found.update(f"calls.{why}" for why in whys if why and (why in MISSING or not some))
    if found or not (chosen and rejected):
        found["groups.incomplete_pair"] += 1
    elif chosen == rejected:
        found["groups.equal_pair"] += 1
    return found


def _learned(judged: Sequence[CallEligibility]) -> list[tuple[list[int], list[int]]]:
    """Prompt and reply of the calls that are trained."""
    return [
        (list(one.record.prompt_token_ids), list(one.record.token_ids))
        for one in judged
        if one.excluded_because is None and one.record is not None
    ]


def _why_excluded(record: CallRecord | None) -> str | None:
    """Reason for which a call's tokens cannot be trained."""
    if record is None:
        return "lost"
    if record.excluded_because is not None:
        return record.excluded_because.partition(":")[0].replace(" ", "_")
    return None if record.token_ids else "empty"


def steps_since(parents: Mapping[int, int], version: int) -> dict[int, int]:
    """The versions that `version` descends from, and itself, each with the steps in between.

    After a rollback, a version's number minus 1 need not be its parent: of the versions 0, 1, 2,
    a rollback to 0, and 3, whose parent is 0, the version 3 is one step from 0, and descends
    neither from 1 nor from 2.

    Args:
        parents: version -> its parent (`JobStore.parents`). One below 1 has none; any other that is
            missing has the number before it as its parent.
        version: the version to begin with.

    Raises:
        ValueError: a parent is not below its version.
    """
    found: dict[int, int] = {}
    while version >= 0:
        found[version] = len(found)
        parent = parents.get(version, version - 1)
        if parent >= version:
            raise ValueError(f"got {parent} as the parent of version {version}, expected a lower")
        version = parent
    return found
