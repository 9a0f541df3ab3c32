"""Two versions compared blind: which of two runs of a held-out scenario a person prefers.

A choice is kept as a review: a score of the run that was shown on the left, whose name says what
it was compared with. 1: it is better; 0: the other is; 0.5: neither.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from pydantic import BaseModel

from langchain_art.statistics.intervals import sign_test, wilson
from langchain_art.wire import Message, Review, Trajectory
from langchain_art_server.storage.run_list import EvaluatedRun

#: Before the id of the other run, in the name of the score that a choice is.
BETTER_THAN = "better_than:"
#: Differences of means that are none but for rounding.
TIE = 1e-12


class Pair(NamedTuple):
    """A run of either version, of one scenario."""

    scenario: str
    before: str
    after: str

    def drawn(self, *salt: str) -> bytes:
        """The same random bytes for the same pair and salt."""
        return hashlib.sha256("\0".join((self.before, self.after, *salt)).encode()).digest()

    def sides(self, reviewer: str) -> tuple[str, str]:
        """Sides, left and right, as they are drawn for a reviewer."""
        swapped = self.drawn(reviewer)[0] % 2
        return (self.after, self.before) if swapped else (self.before, self.after)


class BlindCall(BaseModel):
    """One call of a run, without what would tell the version."""

    node: str | None
    messages: list[Message]
    """The messages that are new in this call."""
    reply: Message | None


class BlindRun(BaseModel):
    """One run of a pair."""

    id: str
    calls: list[BlindCall]


class Preference(BaseModel):
    """The choices of all reviewers, by scenario."""

    preferences: int
    """Choices, ties included."""
    reviewers: int
    better: int
    """Scenarios in which the later version is preferred more often than not."""
    worse: int
    ties: int
    rate: float | None
    """``better / (better + worse)``; None without either."""
    low: float | None
    """The 95 % interval of `rate`, by Wilson."""
    high: float | None
    p_value: float
    """`sign_test` of the scenarios that are no ties."""


class BlindView(BaseModel):
    """The answer of ``GET /page/blind``."""

    pairs: int
    """Number of pairs of runs of the same scenario."""
    compared: int
    """Pairs that the reviewer has compared."""
    scenario: str | None
    """The next pair's; None: the reviewer has compared all, or none was named."""
    left: BlindRun | None
    right: BlindRun | None
    preference: Preference | None
    """None while the reviewer still compares."""


def pairs_of(before: Sequence[EvaluatedRun], after: Sequence[EvaluatedRun]) -> list[Pair]:
    """The runs of the same scenarios in pairs: one of each scenario first, then the second ones.

    Runs are paired in the order in which they came, and pairs stand in an order that is drawn.
    """
    first, second = by_scenario(before), by_scenario(after)
    found = [
        (number, Pair(scenario, old.id, new.id))
        for scenario in first.keys() & second.keys()
        for number, (old, new) in enumerate(zip(first[scenario], second[scenario], strict=False))
    ]
    return [pair for _, pair in sorted(found, key=lambda one: (one[0], one[1].drawn()))]


def next_pair(
    pairs: Sequence[Pair], reviews: Iterable[Review], reviewer: str
) -> tuple[Pair | None, int]:
    """The first pair that a reviewer has not compared, and how many he has."""
    done = {runs for runs, who in choices(reviews) if who == reviewer}
    left = [one for one in pairs if frozenset(one[1:]) not in done]
    return (left[0] if left else None), len(pairs) - len(left)


def choices(reviews: Iterable[Review]) -> dict[tuple[frozenset[str], str], Review]:
    """Last choice by pair of runs and reviewer, without those that were taken back."""
    found: dict[tuple[frozenset[str], str], Review] = {}
    for one in sorted(reviews, key=lambda review: review.at):
        if one.kind == "score" and one.name.startswith(BETTER_THAN) and one.call_id is None:
            other = one.name.removeprefix(BETTER_THAN)
            found[frozenset((one.trajectory, other)), one.reviewer or one.id] = one
    return {key: one for key, one in found.items() if one.value is not None}


def preference(pairs: Sequence[Pair], reviews: Iterable[Review]) -> Preference:
    """The scenarios in which `Pair.after` is preferred, and the sign test.

    Choices of one scenario depend on each other: their mean counts, once.
    """
    by_pair = {frozenset(one[1:]): one for one in pairs}
    said: defaultdict[str, list[float]] = defaultdict(list)
    reviewers: set[str] = set()
    for (runs, who), one in choices(reviews).items():
        if (pair := by_pair.get(runs)) is not None and one.value is not None:
            said[pair.scenario].append(one.value if one.trajectory == pair.after else 1 - one.value)
            reviewers.add(who)
    means = [fmean(values) - 0.5 for values in said.values()]
    better, worse = sum(one > TIE for one in means), sum(one < -TIE for one in means)
    decided = better + worse
    low, high = wilson(better, decided) if decided else (None, None)
    return Preference(
        preferences=sum(map(len, said.values())),
        reviewers=len(reviewers),
        better=better,
        worse=worse,
        ties=len(means) - decided,
        rate=better / decided if decided else None,
        low=low,
        high=high,
        p_value=sign_test(better, worse),
    )


def blind_run(run: Trajectory) -> BlindRun:
    """A run's prompts and replies, without calls that were excluded."""
    calls: list[BlindCall] = []
    for index, turn in enumerate(run.turns):
        if turn.excluded_because is None:
            shown = turn.extends is not None and run.turns[turn.extends].excluded_because is None
            messages = list(turn.messages) if shown else run.prompt(index)
            calls.append(BlindCall(node=turn.node, messages=messages, reply=turn.reply))
    return BlindRun(id=run.id, calls=calls)


def by_scenario(runs: Iterable[EvaluatedRun]) -> Mapping[str, list[EvaluatedRun]]:
    """The runs of each scenario, in their order."""
    found = defaultdict[str, list[EvaluatedRun]](list)
    for run in runs:
        found[run.scenario].append(run)
    return found
