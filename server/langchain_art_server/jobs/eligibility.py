"""Which calls of a run may be trained, and why the others may not.

Training and the audit both ask `check_eligibility`. The reasons are the words behind ``calls.`` in
`TrainResult.excluded`:

- ``superseded_…``: the graph discarded the call;
- ``foreign``: another server's model;
- ``other_policy``: sampled by another policy, or by the base model;
- ``frozen``: `TrainRequest.trainable` does not choose it;
- ``lost``: the server has no record of it;
- ``greedy_decoding``: at temperature 0 nothing is drawn;
- ``truncated_sampling``, ``grammar``: drawn from a part of the vocabulary that is not known;
- ``empty``: nothing was sampled;
- ``too_long``: more tokens than the model takes (a turn that was not sampled here);
- ``already_trained``: an earlier job trained it, in this run or in another;
- ``repeated``: a reply that was used twice, in this run (from a cache) or in another one of the
  batch; its first use is trained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from langchain_art.wire import Trajectory, Turn
from langchain_art_server.storage.tables import CallRecord


@dataclass(frozen=True)
class CallEligibility:
    """A turn, its record if there is one, and why it is not trained (None: it is)."""

    turn: Turn
    record: CallRecord | None
    excluded_because: str | None

    @property
    def node(self) -> str:
        """Its key in `TrainResult.nodes`."""
        return "/".join(self.turn.path) or self.turn.node or "-"

    @property
    def policy(self) -> str | None:
        """Which policy sampled it, as far as is known; None: not one of this server."""
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
    """For each turn of a run, whether it may be trained, and if not, why.

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
        excluded_because = _why_excluded(turn, record, policy, trainable, imitates)
        if excluded_because is None and record is not None:
            if record.id in trained:
                excluded_because = "already_trained"
            elif record.id in learning:
                excluded_because = "repeated"
            learning.add(record.id)
        checked.append(CallEligibility(turn, record, excluded_because))
    return checked


def _why_excluded(
    turn: Turn,
    record: CallRecord | None,
    policy: str | None,
    trainable: Mapping[str, bool],
    imitates: bool,
) -> str | None:
    if turn.excluded_because is not None:
        return f"superseded_{turn.excluded_because}"
    if record is None and not turn.ours:
        return "foreign"
    if not imitates and record and (not record.policy or policy not in (None, record.policy)):
        return "other_policy"
    if not turn.learns(trainable):
        return "frozen"
    if record is None:
        return "lost"
    if record.excluded_because is not None:
        return record.excluded_because.partition(":")[0].replace(" ", "_")
    return None if record.token_ids else "empty"
