"""What is excluded from training, and why: no reward, staleness, truncation. No torch.

Each function checks one rule and returns a key of `TrainResult.excluded`, whose first part is the
unit that is excluded: ``groups.``, ``runs.`` or ``calls.``. Zero variance is excluded by
`credit_assignment`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from langchain_art_server.algorithms.credit.candidates import CandidateCall, CandidateRun


def unscored(run: CandidateRun, scores: Collection[str] = ()) -> str | None:
    """Why a run has no reward to learn from; None if it has.

    A failed run that was scored counts with that reward. A run without a score never counts as 0.

    Args:
        run: of a group.
        scores: names of the scores that replace the reward; empty: the reward counts.
    """
    if all(name in run.scores for name in scores) if scores else run.rewarded:
        return None
    return "runs.failed" if run.failed else "runs.unscored"


def stale(runs: Sequence[CandidateRun], max_staleness: int | None) -> str | None:
    """``groups.stale`` if the staleness of a group is above the limit, else None.

    The group is excluded whole: without its oldest runs, which are its longest, the baseline of
    the others would be biased (verl and prime-rl do the same).

    Args:
        runs: of one group.
        max_staleness: how many versions older than the trained one a call's sampler may be; None:
            any number.
    """
    lags = [call.lag for run in runs for call in run.calls if call.learns]
    too_old = max_staleness is not None and max(lags, default=0) > max_staleness
    return "groups.stale" if too_old else None


def exclusion(run: CandidateRun, call: CandidateCall, mask_truncated: bool) -> str | None:
    """Why the tokens of a call are not trained, in a run that counts; None if they are.

    Truncated replies are left out of the loss and of its denominator; the run's reward stays in
    the baseline (arXiv 2503.14476, section 3.4).

    Args:
        run: with this call.
        call: of the run.
        mask_truncated: exclude truncated replies, and truncated runs whole.
    """
    if call.excluded_because is not None:
        return f"calls.{call.excluded_because}"
    if not call.steps:
        return "calls.superseded" if call.superseded else "calls.frozen"
    if mask_truncated and run.truncated:
        return "runs.truncated"
    if mask_truncated and call.truncated:
        return "calls.truncated"
    return None if call.tokens else "calls.empty"
