"""Intervals, tests and comparisons by established formulas, without a library of statistics."""

from __future__ import annotations

import html
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from langchain_art.wire.identifiers import Frozen

#: Of the two-sided 95 % interval of a normal distribution; 1.96 rounded.
Z95 = statistics.NormalDist().inv_cdf(0.975)
#: Scenarios up to which all sign flips are counted, and how many are drawn for more.
EXACT, DRAWS = 14, 10_000
_TIE = 1e-12


class PairedTest(NamedTuple):
    """The difference of paired values, its interval, and how likely chance alone gives as much."""

    difference: float
    """Mean of after minus before."""
    ci95: float | None
    """Half width, 1.96 · s/√n of the differences; None with fewer than two."""
    p_value: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of sorted values, interpolated linearly between the two nearest."""
    place = share * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (place % 1) * (above - below)


class MeanOfScenarios(NamedTuple):
    """The mean reward of some scenarios, each of which was run once or more."""

    mean: float | None
    """Mean of all rewards; None without one."""
    ci95: float | None
    """Half width of the 95 % interval, 1.96 · s/√n over the scenarios' means; None with fewer than
    two scenarios."""
    rewards: int
    scenarios: int


def best_of(rewards: Sequence[float], k: int) -> float:
    """The expected best reward of k runs of one scenario, of which n >= k are known: unbiased.

    The mean of the maximum over all subsets of k: ``Σ_{i=k..n} C(i-1, k-1) r_(i) / C(n, k)``
    with r_(i) the i-th smallest. For rewards of 0 and 1, c of them 1, this is pass@k,
    ``1 - C(n-c, k) / C(n, k)`` (Chen et al. 2021, arXiv 2107.03374).

    Raises:
        ValueError: `k` is not in 1 to n.
    """
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"got k={k} of {n} rewards, expected 1 to {n}: sample each scenario more")
    terms, share = [], k / n
    for i, reward in zip(range(n, k - 1, -1), sorted(rewards, reverse=True), strict=False):
        terms.append(share * reward)
        share *= (i - k) / max(i - 1, 1)
    return math.fsum(terms)


def best_of_scenarios(rewards: Iterable[Sequence[float]]) -> dict[int, float]:
    """Mean `best_of` k runs over the scenarios, by k; pass@k for rewards of 0 and 1.

    For k of 1, 2, 4, … and the least number of rewards that a scenario has; empty if that is below
    two.

    Args:
        rewards: of each scenario its runs' rewards; those without any are left out.
    """
    known = [some for some in rewards if some]
    least = min(map(len, known), default=0)
    if least < 2:
        return {}
    counts = sorted({2**i for i in range(least.bit_length())} | {least})
    return {k: statistics.fmean(best_of(some, k) for some in known) for k in counts}


def mean_of_scenarios(rewards: Iterable[Sequence[float]]) -> MeanOfScenarios:
    """The mean of rewards, and its interval over scenarios: runs of one vary together."""
    known = [some for some in rewards if some]
    every = [reward for some in known for reward in some]
    means = [statistics.fmean(some) for some in known]
    return MeanOfScenarios(
        statistics.fmean(every) if every else None,
        Z95 * statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        len(every),
        len(means),
    )


def student_tail(t: float, freedom: int) -> float:
    """The probability that Student's t with 1 or more degrees of freedom is above `t`, 0 or more.

    By the finite series for whole degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and
    26.7.4); exact to about 1e-15, so that smaller probabilities come out as 0.
    """
    angle = math.atan2(t, math.sqrt(freedom))
    square, odd = math.cos(angle) ** 2, freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for n in range(2 if odd else 1, freedom - 1, 2):
        term *= square * n / (n + 1)
        total += term
    inside = math.sin(angle) * total
    if odd:
        inside = 2 / math.pi * (angle + inside)
    return max(0.0, (1 - inside) / 2)


def welch(before: tuple[float, float, int], after: tuple[float, float, int]) -> float:
    """Standard errors by which a mean rose (Welch's statistic), of samples' (mean, variance, size).

    Without variance it is 0.0 for equal means, else infinite.
    """
    rise = after[0] - before[0]
    if error := sum(variance / n for _, variance, n in (before, after)):
        return rise / math.sqrt(error)
    return math.copysign(math.inf, rise) if rise else 0.0


def clear_of_chance(difference: float, *ci95: float | None) -> bool:
    """True if a difference of independent means is above its 95 % interval, √(ci95² + ci95²).

    `ci95`: half widths of the intervals of the means; without one of them nothing is clear.
    """
    known = [one for one in ci95 if one is not None]
    return len(known) == len(ci95) and difference > math.hypot(*known)


def wilson(successes: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a rate: Wilson's score interval.

    It is inside 0 and 1 and has nearly its nominal coverage for small n also (Wilson 1927, JASA 22;
    Brown, Cai and DasGupta 2001, Statistical Science 16). It takes the n trials as independent.

    Raises:
        ValueError: `n` is not positive, or `successes` is not in 0 to `n`.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"got {successes} of {n}, expected a count of at least one trial")
    rate, z2 = successes / n, Z95**2
    middle = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    # Whatever is rounded, the rate itself is inside.
    return max(0.0, min(rate, middle - half)), min(1.0, max(rate, middle + half))


def paired_test(differences: Sequence[float], seed: int = 0) -> PairedTest:
    """The paired sign-flip permutation test of a mean difference (Fisher 1935), two-sided.

    Without an effect each difference is as likely to have the other sign. Of up to 14 differences
    all 2^n signs are counted; of more, 10,000 are drawn, with p = (b + 1) / (m + 1) (Phipson and
    Smyth 2010, arXiv 1603.05766). No distribution is assumed; with n differences p is at least
    2 / 2^n, so fewer than six are never significant at 0.05.

    Raises:
        ValueError: there is no difference.
    """
    n = len(differences)
    if not n:
        raise ValueError("got no differences, expected at least one")
    observed = abs(math.fsum(differences)) - _TIE
    if n <= EXACT:
        sums = _flipped_sums(differences)
        p_value = sum(abs(one) >= observed for one in sums) / len(sums)
    else:
        chance = random.Random(seed)
        extreme = sum(
            abs(sum(d if chance.random() < 0.5 else -d for d in differences)) >= observed
            for _ in range(DRAWS)
        )
        p_value = (extreme + 1) / (DRAWS + 1)
    spread = Z95 * statistics.stdev(differences) / math.sqrt(n) if n > 1 else None
    return PairedTest(statistics.fmean(differences), spread, p_value)


def sign_flip_tail(differences: Sequence[float]) -> float:
    """The probability that random signs give a sum of differences as high: one-sided.

    Differences of 0 have no sign and say nothing. Of up to 14 others all 2^n signs are counted;
    of more, the sum is taken as normal, with the variance Σd², which differs from the exact
    probability by a factor of at most 3.18 (Bentkus and Dzindzalieta 2015, Bernoulli 21).
    """
    signed = [one for one in differences if one]
    total = math.fsum(signed)
    if len(signed) <= EXACT:
        sums = _flipped_sums(signed)
        return sum(one >= total - _TIE for one in sums) / len(sums)
    return statistics.NormalDist().cdf(-total / math.hypot(*signed))


def sign_test(wins: int, losses: int) -> float:
    """The exact sign test, two-sided: how likely a fair coin falls as unevenly or more.

    By the binomial distribution of 1/2, twice its smaller tail; ties are left out (Dixon and Mood
    1946, JASA 41). The trials are taken as independent.
    """
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)


def _flipped_sums(differences: Sequence[float]) -> list[float]:
    sums = [0.0]
    for one in differences:
        sums = [total + signed for total in sums for signed in (one, -one)]
    return sums


def unpaired_test(before: Sequence[float], after: Sequence[float], seed: int = 0) -> PairedTest:
    """The permutation test of a difference of means of two independent groups, two-sided.

    10,000 random assignments to the groups, p = (b + 1) / (m + 1) as in `paired_test`. The interval
    is that of two independent means, 1.96 · √(s₁²/n₁ + s₂²/n₂).

    Raises:
        ValueError: a group is empty.
    """
    if not before or not after:
        raise ValueError("got an empty group, expected at least one value in each")
    found = statistics.fmean(after) - statistics.fmean(before)
    together, total = [*before, *after], math.fsum([*before, *after])
    k, n = len(after), len(before) + len(after)
    chance, extreme = random.Random(seed), 0
    for _ in range(DRAWS):
        mine = sum(chance.sample(together, k))
        extreme += abs(mine / k - (total - mine) / (n - k)) >= abs(found) - _TIE
    spread = None
    if min(len(before), len(after)) > 1:
        shares = statistics.variance(before) / len(before) + statistics.variance(after) / k
        spread = Z95 * math.sqrt(shares)
    return PairedTest(found, spread, (extreme + 1) / (DRAWS + 1))


Rewards = Mapping[str, Sequence[float]]
"""Scenario -> the rewards of its runs."""


class Comparison(Frozen):
    """Comparison of the rewards of two versions' runs."""

    before: str
    after: str
    paired: bool
    """True if both have runs of at least two same scenarios, and only these are compared."""
    scenarios: int
    """Pairs; unpaired, scenarios of both."""
    left_out: int
    """Scenarios that only one of them has runs of, where it is paired."""
    difference: float
    """Mean reward after minus before, each scenario weighing the same."""
    ci95: float | None
    p_value: float
    test: str

    @property
    def significant(self) -> bool:
        """True if chance alone would give such a difference in less than 5 % of cases."""
        return self.p_value < 0.05

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(str(self))}</div>"

    def __str__(self) -> str:
        spread = "" if self.ci95 is None else f" ± {self.ci95:.3f}"
        verdict = "significant" if self.significant else "not significant"
        found = f"{self.difference:+.3f}{spread}, p = {self.p_value:.3g}, {verdict} at 5 %"
        return f"{self.before} → {self.after}: {found} ({self.scenarios} scenarios; {self.test})"


def compare_rewards(before: str, after: str, first: Rewards, second: Rewards) -> Comparison:
    """Test if the rewards of `after`, `second`, are higher than those of `before`, `first`.

    Where both have rewards of the same scenarios, at least two, the means of these are compared in
    pairs (`intervals.paired_test`); else the means of all of either (`intervals.unpaired_test`).

    Raises:
        ValueError: one of them has no reward.
    """
    means = [
        {name: statistics.fmean(given) for name, given in rewards.items() if given}
        for rewards in (first, second)
    ]
    old, new = means
    shared, alone = sorted(old.keys() & new.keys()), old.keys() ^ new.keys()
    paired = len(shared) >= 2
    if paired:
        tested = paired_test([new[name] - old[name] for name in shared])
        draws = "exact" if len(shared) <= EXACT else "10,000 draws"
        test = f"paired sign-flip permutation test, {draws}"
    else:
        tested = unpaired_test(list(old.values()), list(new.values()))
        test = "unpaired permutation test, 10,000 draws"
    return Comparison(
        before=before,
        after=after,
        paired=paired,
        scenarios=len(shared) if paired else len(old) + len(new),
        left_out=len(alone) if paired else 0,
        **tested._asdict(),
        test=test,
    )
