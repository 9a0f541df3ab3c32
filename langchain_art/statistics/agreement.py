"""One verdict of several reviewers on one run; and how far they agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from langchain_art.errors import ConfigError
from langchain_art.wire import Review

#: Differences of lengths that are none but for rounding.
_TIE = 1e-12
#: The source of reviews that are a judge's scores (`langchain-art review calibrate`).
JUDGE = "judge"
Subject = tuple[str, str | None]
"""A trajectory's id, and the id of one of its calls; None: the whole run."""


@dataclass(frozen=True)
class Consensus:
    """Combined verdict of the reviewers of one run or call."""

    trajectory: str
    call_id: str | None
    value: float
    """The mean of the reviewers' values; where they disagree and a `majority` agrees, its mean."""
    reviewers: int
    agreement: float | None
    """1: all say the same. 0: they agree as verdicts do that are drawn at random from all of them.
    None: there is one reviewer."""
    abstains: bool
    """True if the reviewers agree too little for `value` to be used."""


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of all runs and calls that were reviewed under one name."""

    all: tuple[Consensus, ...]
    alpha: float | None
    """Krippendorff's alpha of the reviewers; None: nothing has two reviewers, or all values are
    equal."""
    taken_back: int
    """Reviews whose reviewer took them back (a reward of None)."""

    @property
    def used(self) -> tuple[Consensus, ...]:
        """Verdicts that do not abstain."""
        return tuple(one for one in self.all if not one.abstains)


def verdicts(reviews: Iterable[Review], name: str, *, min_agreement: float = 0.0) -> Verdicts:
    """One verdict for each run and call that has reviews with values under a name.

    A reviewer counts once on each: by the latest review. Reviews without a reviewer are of one
    each. Those of a `JUDGE` count where no person has said anything. Reviewers disagree where their
    `Consensus.agreement` is not above `min_agreement`: most of them decide if they agree with each
    other (`majority`), or else the verdict abstains.

    Args:
        reviews: of any kind; corrections have no value and are passed over.
        name: of the score: ``human_reward``.
        min_agreement: from -1 or less (all are used) up to 1.

    Raises:
        ConfigError: `min_agreement` is above 1.
    """
    if not min_agreement <= 1:
        raise ConfigError(f"got {min_agreement=}, expected at most 1")
    latest: dict[tuple[Subject, str], Review] = {}
    for one in reviews:
        if one.name == name and one.kind != "correction":
            who = one.reviewer if one.reviewer is not None else f"\0{one.source}\0{one.id}"
            key = ((one.trajectory, one.call_id), who)
            if key not in latest or latest[key].at <= one.at:
                latest[key] = one
    values: dict[Subject, list[float]] = {}
    taken_back = 0
    spoken = {key[0] for key, one in latest.items() if one.source != JUDGE and not one.taken_back}
    for (subject, _), one in latest.items():
        if one.source == JUDGE and subject in spoken:
            continue
        if one.value is None:
            taken_back += 1
        else:
            values.setdefault(subject, []).append(one.value)
    whole = _variance([value for given in values.values() if len(given) > 1 for value in given])
    found: list[Consensus] = []
    for subject, given in values.items():
        agreement = _term(given, whole) if len(given) > 1 else None
        value, abstains = fmean(given), False
        if agreement is not None and agreement <= min_agreement:
            most = majority(given)
            abstains = most is None or _term(most, whole) <= min_agreement
            value = fmean(most) if most is not None and not abstains else value
        found.append(Consensus(*subject, value, len(given), agreement, abstains))
    return Verdicts(tuple(found), krippendorff_alpha(list(values.values())), taken_back)


def majority(given: Sequence[float]) -> Sequence[float] | None:
    """The shortest half of the values: the n // 2 + 1 of them that are nearest to each other.

    Its mean is the shorth (Andrews et al., Robust Estimates of Location, 1972). None: there are
    fewer than three values, or two such halves are equally short, so that none is the majority.
    """
    size, ordered = len(given) // 2 + 1, sorted(given)
    halves = [ordered[at : at + size] for at in range(len(ordered) - size + 1)]
    lengths = [half[-1] - half[0] for half in halves]
    shortest = [
        half for half, length in zip(halves, lengths, strict=True) if length <= min(lengths) + _TIE
    ]
    return shortest[0] if len(given) > 2 and all(half == shortest[0] for half in shortest) else None


def krippendorff_alpha(units: Sequence[Sequence[float]]) -> float | None:
    """Krippendorff's alpha for interval data: 1 is agreement, 0 is chance.

    ``alpha = 1 - D_o / D_e``, with the squared differences of all pairs of values of one unit
    (D_o) and of all values (D_e); Krippendorff, Content Analysis, 2nd edition (2004), chapter 11.
    Units with fewer than two values have no pairs and are passed over.

    Returns:
        None: there is no pair, or all values are equal, where alpha is not defined.
    """
    pairable = [unit for unit in units if len(unit) > 1]
    everything = [value for unit in pairable for value in unit]
    if not (whole := _variance(everything)):
        return None
    return sum(len(unit) * _term(unit, whole) for unit in pairable) / len(everything)


def _term(given: Sequence[float], whole: float) -> float:
    """Term of alpha, ``1 - s_u^2 / s^2``, of a subject's values; 1 if all values are equal.

    `whole` is ``s^2``, the variance of all values of subjects that have several. Alpha is the mean
    of these terms, weighted by the numbers of values.
    """
    return 1.0 - _variance(given) / whole if whole else 1.0


def _variance(values: Sequence[float]) -> float:
    """The variance by n - 1: half the mean squared difference of two of the values."""
    return variance(values) if len(values) > 1 else 0.0
