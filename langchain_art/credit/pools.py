"""Pools: what credit assignment compares, and the calls to which each value is given."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

from langchain_art.credit.candidates import CandidateRun

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
