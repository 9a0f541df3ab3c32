"""Input and output of credit assignment: calls and runs, and a decision on each call. No torch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CandidateCall:
    """One model call of a run.

    Attributes:
        tokens: how many were sampled.
        node: the role that made it, as the graph names it.
        learns: sampled by the policy that is trained, at a node that `trainable` chooses. False for
            a frozen judge, a user simulator or a foreign model: context, and in no baseline.
        superseded: the graph discarded it. It is no step of the run, and has no reward.
        excluded_because: why its tokens are not trained, where that is known (``lost``,
            ``grammar`` …).
        truncated: its reply was cut off (finish reason ``length``).
        lag: staleness: how many versions older than the trained one its sampler was.
        reward: of this call alone; None: none.
        anchor: key of the state that it was asked in; calls with equal keys are compared.
    """

    tokens: int
    node: str = "-"
    learns: bool = True
    superseded: bool = False
    excluded_because: str | None = None
    truncated: bool = False
    lag: int = 0
    reward: float | None = None
    anchor: Hashable = None

    @property
    def steps(self) -> bool:
        """Whether it is a step of the policy: what credit is given to."""
        return self.learns and not self.superseded


@dataclass(frozen=True, slots=True)
class CandidateRun:
    """One run of a group.

    Attributes:
        calls: in the order in which they were made.
        reward: of the whole run; None: not scored, which is not zero.
        scores: rewards by name, for `TrainConfig.scores`.
        failed: it ended in an error.
        truncated: it was cut off (recursion limit, time-out).
    """

    calls: tuple[CandidateCall, ...]
    reward: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    failed: bool = False
    truncated: bool = False

    @property
    def rewarded(self) -> bool:
        """Whether it has a reward: its own, or a call's."""
        return self.reward is not None or any(call.reward is not None for call in self.calls)

    @property
    def total(self) -> float:
        """Its own reward plus those of its calls."""
        return math.fsum([self.reward or 0.0, *(call.reward or 0.0 for call in self.calls)])

    @property
    def learns(self) -> bool:
        """Whether the policy sampled a chosen call in it, superseded and untrainable ones included.

        Its reward is then a sample of what the policy does, and counts in the baseline.
        """
        return any(call.learns for call in self.calls)


@dataclass(frozen=True, slots=True)
class CallDecision:
    """Whether and how one call is trained.

    Attributes:
        excluded_because: as in `TrainResult.excluded`; None if it is trained.
        advantage: of each of its tokens; 0.0 if it is not trained.
        weight: of each of its tokens in the loss; 0.0 if it is not trained.
    """

    excluded_because: str | None
    advantage: float = 0.0
    weight: float = 0.0
