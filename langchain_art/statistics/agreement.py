"""What several reviewers say of one run, as one verdict; and how far they agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from langchain_art.errors import ConfigError
from langchain_art.wire import Review

Subject = tuple[str, str | None]
"""A trajectory's id, and the id of one of its calls; None: the whole run."""


@dataclass(frozen=True)
class Consensus:
    """What reviewers say of one run or call."""

    trajectory: str
    call_id: str | None
    value: float
    """The mean of the reviewers' values."""
    reviewers: int
    agreement: float | None
    """1: all say the same. 0: they agree as verdicts do that are drawn at random from all of them.
    None: there is one reviewer."""
    abstains: bool
    """Whether the reviewers agree too little for `value` to be used."""


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
        """Those that do not abstain."""
        return tuple(one for one in self.all if not one.abstains)


def verdicts(reviews: Iterable[Review], name: str, *, min_agreement: float = 0.0) -> Verdicts:
    """One verdict for each run and call that has reviews with values under a name.

    A reviewer counts once on each: by the latest review. Reviews without a reviewer are of one
    each. One abstains where the reviewers' `Consensus.agreement` is not above `min_agreement`.

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
    for (subject, _), one in latest.items():
        if one.value is None:
            taken_back += 1
        else:
            values.setdefault(subject, []).append(one.value)
    agreed = agreements(values)
    found = tuple(
        Consensus(
            trajectory=subject[0],
            call_id=subject[1],
            value=fmean(given),
            reviewers=len(given),
            agreement=agreed.get(subject),
            abstains=subject in agreed and agreed[subject] <= min_agreement,
        )
        for subject, given in values.items()
    )
    return Verdicts(found, krippendorff_alpha(list(values.values())), taken_back)


def agreements(values: Mapping[Subject, Sequence[float]]) -> dict[Subject, float]:
    """By subject with several values: its term of Krippendorff's alpha, ``1 - s_u^2 / s^2``.

    ``s_u^2`` is the variance of the subject's values and ``s^2`` that of all values of such
    subjects, each by ``n - 1``. Alpha is the mean of these terms, weighted by the numbers of
    values. If all values are equal, every term is 1.
    """
    several = {subject: given for subject, given in values.items() if len(given) > 1}
    whole = _variance([value for given in several.values() for value in given])
    return {
        subject: 1.0 - _variance(given) / whole if whole else 1.0
        for subject, given in several.items()
    }


def krippendorff_alpha(units: Sequence[Sequence[float]]) -> float | None:
    """Krippendorff's alpha for interval data: 1 is agreement, 0 is chance.

    ``alpha = 1 - D_o / D_e``, with the squared differences of all pairs of values of one unit
    (D_o) and of all values (D_e); Krippendorff, Content Analysis, 2nd edition (2004), chapter 11.
    Units with fewer than two values have no pairs and are passed over.

    Returns:
        None: there is no pair, or all values are equal, where alpha is not defined.
    """
    pairable = [list(unit) for unit in units if len(unit) > 1]
    everything = [value for unit in pairable for value in unit]
    whole = _variance(everything) if everything else 0.0
    if not whole:
        return None
    within = sum(len(unit) * _variance(unit) for unit in pairable) / len(everything)
    return 1.0 - within / whole


def _variance(values: Sequence[float]) -> float:
    """The variance by n - 1: half the mean squared difference of two of the values."""
    if len(values) < 2 or max(values) == min(values):  # exactly 0, whatever the mean rounds to
        return 0.0
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)
