"""Turns of trajectories as candidates for training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from langchain_art.credit.candidates import CandidateCall, CandidateRun
from langchain_art.wire import Trajectory, Turn
from langchain_art.wire.calls import label
from langchain_art.wire.training import CallAdvantage


def why_excluded(
    turn: Turn,
    sampled_by: str | None,
    policy: str | None,
    trainable: Mapping[str, bool],
    *,
    imitates: bool = False,
) -> str | None:
    """Reason for which the graph, its sampler or `trainable` exclude a call; None: they do not.

    Args:
        turn: the call.
        sampled_by: the policy that sampled it, empty for the base model; None: not known.
        policy: the one that is trained; None: whichever sampled the turn.
        trainable: `TrainRequest.trainable`.
        imitates: a supervised step, for which it does not matter who sampled the call.
    """
    if turn.excluded_because is not None:
        return f"superseded_{turn.excluded_because}"
    if sampled_by is None and not turn.ours:
        return "foreign"
    known = not imitates and sampled_by is not None
    if known and (not sampled_by or policy not in (None, sampled_by)):
        return "other_policy"
    return None if turn.learns(trainable) else "frozen"


def candidate_call(turn: Turn, mine: bool, trainable: Mapping[str, bool]) -> CandidateCall:
    """A turn before anything is known of its tokens; `mine`: sampled by the trained policy."""
    superseded = turn.excluded_because is not None
    return CandidateCall(
        tokens=0,
        node=label(turn),
        learns=mine and turn.learns(trainable),
        superseded=superseded,
        reward=None if superseded else turn.reward,
    )


def candidate_run(
    run: Trajectory,
    calls: Iterable[CandidateCall],
    advantages: Mapping[str, Sequence[CallAdvantage | None]] | None = None,
) -> CandidateRun:
    """A trajectory with its turns as `calls`; `advantages`: `TrainRequest.advantages`."""
    return CandidateRun(
        calls=tuple(calls),
        reward=run.reward,
        scores=run.scores,
        advantages=(advantages or {}).get(run.id),
        failed=run.status == "failed",
        truncated=run.status == "truncated",
    )
