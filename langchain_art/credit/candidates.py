"""Input and output of credit assignment: calls and runs, and a decision on each call. No torch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CandidateCall:
    """One model call of a run."""

    tokens: int  # how many were sampled
    node: str = "-"  # the role that made it, as the graph names it
    learns: bool = True
    """True if it was sampled by the policy that is trained, at a node that `trainable` chooses.
    False for a frozen judge, a user simulator or a foreign model: context, and in no baseline."""
    superseded: bool = False  # the graph discarded it: no step of the run, and without reward
    excluded_because: str | None = None  # why its tokens are not trained, where that is known
    truncated: bool = False  # its reply was cut off (finish reason ``length``)
    lag: int | None = 0
    """Staleness: how many steps made the trained version from the one that sampled the call. None:
    the trained one does not descend from it, since a rollback."""
    reward: float | None = None  # of this call alone; None: none
    prompt: Sequence[Hashable] | None = None
    """Prompt of the call, token by token: calls with the same prompt were asked in one state."""

    @property
    def steps(self) -> bool:
        """True if it is a step of the policy, to which credit is given."""
        return self.learns and not self.superseded


@dataclass(frozen=True, slots=True)
class CandidateRun:
    """One run of a group."""

    calls: tuple[CandidateCall, ...]  # in the order in which they were made
    reward: float | None = None  # of the whole run; None: not scored, which is not zero
    scores: Mapping[str, float] = field(default_factory=dict[str, float])  # rewards by name
    advantages: Sequence[float | Sequence[float] | None] | None = None
    """Advantages given with the step, for each call: one for all of its tokens, or for each; None:
    none."""
    failed: bool = False  # it ended in an error
    truncated: bool = False  # it was cut off (recursion limit, time-out)

    @property
    def rewarded(self) -> bool:
        """True if it has a reward: its own, or a call's."""
        return self.reward is not None or any(call.reward is not None for call in self.calls)

    @property
    def total(self) -> float:
        """Sum of its own reward and those of its calls."""
        return math.fsum([self.reward or 0.0, *(call.reward or 0.0 for call in self.calls)])

    @property
    def learns(self) -> bool:
        """True if the policy sampled a chosen call in it, superseded and untrainable ones included.

        Its reward is then a sample of what the policy does, and counts in the baseline.
        """
        return any(call.learns for call in self.calls)


@dataclass(slots=True)
class CallDecision:
    """Decision on one call: if it is trained, and how; numbers are 0.0 if it is not."""

    excluded_because: str | None  # as in `TrainResult.excluded`; None if it is trained
    advantage: float | Sequence[float] = 0.0  # of all of its tokens, or of each
    weight: float = 0.0  # of each of its tokens in the loss

    @property
    def mean(self) -> float:
        """Mean of its tokens' advantages."""
        given = self.advantage
        return math.fsum(given) / (len(given) or 1) if isinstance(given, Sequence) else given

    @property
    def mean_abs(self) -> float:
        """Mean of the absolute values of its tokens' advantages."""
        given = self.advantage
        if isinstance(given, Sequence):
            return math.fsum(map(abs, given)) / (len(given) or 1)
        return abs(given)
