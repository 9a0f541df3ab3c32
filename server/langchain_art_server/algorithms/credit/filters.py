"""What is left out of training, and why. No torch.

Each function looks at one thing and gives the reason in the words of `TrainResult.excluded`, whose
first part is the unit that is left out: ``groups.``, ``runs.`` or ``calls.``. Zero variance is
`credit_assignment`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from langchain_art_server.algorithms.credit.candidates import CandidateCall, CandidateRun


def unscored(run: CandidateRun, scores: Collection[str] = ()) -> str | None:
    """Why a run has nothing to be judged by; None if it has.

    A run that failed counts if it was scored all the same: that reward is its user's word. One
    that was not scored never counts as 0.

    Args:
        run: of a group.
        scores: names of the scores that are learned from; empty: its rewards are.
    """
    if all(name in run.scores for name in scores) if scores else run.rewarded:
        return None
    return "runs.failed" if run.failed else "runs.unscored"


def stale(runs: Sequence[CandidateRun], max_staleness: int | None) -> str | None:
    """Why a whole group is too old; None if it is not.

    The group goes as one: without its oldest runs, which are its longest, the baseline of the
    others would be wrong (verl and prime-rl do the same).

    Args:
        runs: of one group.
        max_staleness: how many versions older than the trained one a call's sampler may be; None:
            any number.
    """
    lags = [call.lag for run in runs for call in run.calls if call.learns]
    too_old = max_staleness is not None and max(lags, default=0) > max_staleness
    return "groups.stale" if too_old else None


def exclusion(run: CandidateRun, call: CandidateCall, mask_truncated: bool) -> str | None:
    """Why the tokens of a call of a run that counts are not trained; None if they are.

    What was cut off is left out of the loss and of what the loss is divided by; the run's reward
    stays in the baseline (arXiv 2503.14476, section 3.4).

    Args:
        run: whose call it is.
        call: any of it.
        mask_truncated: leave out cut-off replies, and cut-off runs whole.
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
