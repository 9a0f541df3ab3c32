"""Input and output of credit assignment: calls and runs, what is compared, a decision on each call.

No torch. A *pool* is what credit assignment compares, with the calls to which each value is given.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from langchain_art.wire import Trajectory, Turn
from langchain_art.wire.training import CallAdvantage


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


def why_excluded(
    turn: Turn,
    sampled_by: str | None,
    policy: str | None,
    trainable: Mapping[str, bool],
    *,
    imitates: bool = False,
) -> str | None:
    """Reason for which the graph, its sampler or `trainable` exclude a call; None: they do not.

    `sampled_by` is the policy that sampled it (empty: the base model; None: not known), `policy`
    the one that is trained (None: whichever sampled it). For a supervised step, which `imitates`,
    it does not matter who sampled the call.
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
        node=turn.label,
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


#: A call: the index of its run in the group, its own index in the run.
Place = tuple[int, int]
#: What is compared: for each unit of the statistics, values and the calls that each is given to.
Pool = dict[Hashable, list[tuple[float, list[Place]]]]
WeightedPools = list[tuple[Pool, float]]
Runs = Sequence[CandidateRun]
#: `TrainRequest.compared` of a group.
Compared = Mapping[str, Sequence[float]]


def steps(runs: Runs, i: int) -> list[Place]:
    """The steps of the policy in run `i`."""
    return [(i, k) for k, call in enumerate(runs[i].calls) if call.steps]


def all_steps(runs: Runs) -> list[Place]:
    """The steps of the policy in all runs."""
    return [place for i in range(len(runs)) for place in steps(runs, i)]


def whole_runs(runs: Runs) -> Pool:
    """Each run's reward, its calls' included, given to all its steps."""
    return {i: [(run.total, steps(runs, i))] for i, run in enumerate(runs)}


def returns(run: CandidateRun, discount: float) -> dict[int, float]:
    """The return of each step of the policy: its own reward and the discounted later ones.

    ``R_t = Σ_{k ≥ t} discount^(k - t) r_k`` over the steps, the run's own reward being that of the
    last one. A reward on another call belongs to the last step before it, or to the first step, if
    there is none. The discount is 0 … 1.

    Example: steps with the rewards ``[1, None, 2]``, the run's own 4, discount 0.5:
    ``{0: 2.5, 1: 3.0, 2: 6.0}``, by the index of the call.
    """
    found: dict[int, float] = {}
    value = run.reward or 0.0
    for index in reversed(range(len(run.calls))):
        call = run.calls[index]
        value += call.reward or 0.0
        if call.steps:
            found[index] = value
            value *= discount
    if found:
        first = min(found)
        found[first] += math.fsum(call.reward or 0.0 for call in run.calls[:first])
    return found
