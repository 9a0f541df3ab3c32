"""Signs that a policy has collapsed, each with its likely cause and what to do.

They are read from the records of the steps. Those of the evaluations are read for a fall that is
certain (`held_out_sign`), and for a gain (`no_gain`).

- ``reward``: the training rewards fell below all before in one step, or in the last few together,
  up to those with sixteen groups: four groups alone are too few to tell a fall from chance;
- ``flat``: in two steps one after the other all groups had zero variance, so nothing was learned;
- ``entropy``: the policy samples nearly the same every time, and its rewards fell;
- ``unmoved``: of the last five trained steps behind the warm-up most moved a policy by less than a
  twentieth of its bound (``step_kl``, `TrainConfig.max_kl`), and rewards did not rise. It is said
  once in a fit;
- ``truncated``: half of the replies or more are cut off at `max_tokens`, where less than a quarter
  was in the first step.

Rewards *fell* if both hold, so that a noisy fit which learns raises no alarm:

- chance: Student's t-test of two samples with a common variance (Student 1908, Biometrika 6) over
  the means of groups, one-sided at 1e-5. A group is one draw of a scenario, whose runs vary
  together. The sample before is of up to five steps: those just before for ``reward``, else the
  best ones, of at least sixteen groups, with Bonferroni's correction for the choice. The means of
  a few groups may be equal by chance, so their variance is taken to be at least that of single
  runs over the runs of a group. Where the values of each sample are all equal, the test has no
  variance: a permutation test stands for it (Fisher 1935, The Design of Experiments), for which
  both samples need about ten values.
- size: half a standard deviation of single runs (Cohen 1988: a medium effect), or all runs have one
  and the same reward, so that nothing more is learned.

A policy that samples the same every time because it has learned all there is to learn has not
fallen: it is said that nothing is learned, and nothing is undone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from langchain_art.statistics import intervals
from langchain_art.training.records import EvalResult, StepRecord, best_of_evals
from langchain_art.wire import TrainConfig

#: Of a fall that is taken for one: its probability by chance, and its size in standard deviations.
CHANCE, EFFECT = 1e-5, 0.5
#: Steps before a fall with which it is compared.
WINDOW = 5
#: Groups of the best steps with which a fall is compared: fewer may be best by a few rare rewards.
_FEWEST = 16
_MOSTLY, _SELDOM = 0.5, 0.25
#: Share of the first step's entropy below which a policy samples nearly the same every time.
DETERMINISTIC = 0.1
#: Trained steps in which a policy has to move, and how far, as a share of its bound.
_STEPS_TO_MOVE, _MOVED = 5, 0.05
#: Standard errors of a rise that is none of chance.
_RISE = 3.0


@dataclass(frozen=True)
class Sign:
    """One sign, in words."""

    kind: str
    words: str
    """Description of what is seen, in which step, and the likely cause."""
    keep: int | None
    """Number of the steps that made good versions; None: going back to one of them would not
    help."""
    advice: str


def new_signs(
    history: Sequence[StepRecord],
    ahead: int = 0,
    configs: Mapping[str, TrainConfig] = MappingProxyType({}),
) -> list[Sign]:
    """Signs that the last step shows and the one before did not; empty: nothing, or no step.

    `history` has the steps that were not rolled back, oldest first. `ahead`
    (`Trainer(max_steps_ahead=)`) is how many versions old the runs of a step may be.
    """
    before = {(one.kind, one.keep is None) for one in _signs(history[:-1], ahead)}
    found = [one for one in _signs(history, ahead) if (one.kind, one.keep is None) not in before]
    return found + [
        sign
        for policy, config in configs.items()
        if (sign := _unmoved(history, policy, config)) is not None
    ]


@dataclass(frozen=True)
class _Sample:
    """Means of groups: their number, mean and variance; and the variance of single runs."""

    n: int
    mean: float
    variance: float
    run_variance: float


def _of_step(record: StepRecord) -> _Sample | None:
    mean, ci95 = record.reward_mean, record.reward_ci95
    if mean is None or ci95 is None or record.groups < 2:
        return None
    n, run_variance = record.groups, (record.reward_std or 0.0) ** 2
    least = run_variance * n / record.runs if record.runs else 0.0
    return _Sample(n, mean, max(least, n * (ci95 / intervals.Z95) ** 2), run_variance)


def _pool(samples: Sequence[_Sample | None]) -> _Sample | None:
    """Several steps as one sample: how far their means are apart counts, too."""
    known = [one for one in samples if one is not None]
    if not known:
        return None
    n = sum(one.n for one in known)
    mean = sum(one.n * one.mean for one in known) / n
    squares = sum((one.n - 1) * one.variance + one.n * (one.mean - mean) ** 2 for one in known)
    return _Sample(n, mean, squares / (n - 1), max(one.run_variance for one in known))


def _fell(samples: Sequence[_Sample | None], last: int = 1, chosen_of: int = 1) -> bool:
    """True if the `last` samples are below the others: see the module.

    `chosen_of`: of how many the others are the highest; the probability has to be smaller by that
    factor (Bonferroni).
    """
    before, after = _pool(samples[:-last]), _pool(samples[-last:])
    if before is None or after is None or after.mean >= before.mean:
        return False
    fall, spread = before.mean - after.mean, max(before.run_variance, after.run_variance)
    if fall < EFFECT * math.sqrt(spread) and after.run_variance > 0:
        return False
    freedom = before.n + after.n - 2
    variance = ((before.n - 1) * before.variance + (after.n - 1) * after.variance) / freedom
    if variance == 0:  # of all orders of as many values, one has these at its end
        return chosen_of / math.comb(before.n + after.n, after.n) < CHANCE
    error = math.sqrt(variance * (1 / before.n + 1 / after.n))
    return intervals.student_tail(fall / error, freedom) < CHANCE / chosen_of


def _peak(history: Sequence[StepRecord], last: int) -> int | None:
    """The step, by index, up to which rewards were best, if the `last` steps fell from there."""
    samples = [_of_step(one) for one in history]
    now = samples[-last:]
    ends = range(len(history) - last)
    windows = {end: samples[max(0, end + 1 - WINDOW) : end + 1] for end in ends}
    pooled = {end: found for end, some in windows.items() if (found := _pool(some)) is not None}
    pooled = {end: found for end, found in pooled.items() if found.n >= _FEWEST}
    if not pooled:
        return None
    end = max(pooled, key=lambda one: (pooled[one].mean, one))
    return end if _fell([*windows[end], *now], last, len(pooled)) else None


def _signs(history: Sequence[StepRecord], ahead: int) -> list[Sign]:
    if not history:
        return []
    found = (_reward, _flat, _entropy, _truncated)
    return [sign for find in found if (sign := find(history, ahead)) is not None]


def _reward(history: Sequence[StepRecord], ahead: int) -> Sign | None:
    """The runs of a step were sampled by the version of the step before."""
    tries = _lengths(history)
    for last in tries:
        earlier = history[: len(history) - last]
        samples = [_of_step(one) for one in history[-WINDOW - last :]]
        if not _fell(samples, last, len(tries)):
            continue
        before, after = _pool(samples[-last - 1 : -last]), _pool(samples[-last:])
        if before is not None and after is not None and after.mean < _lowest(earlier, last):
            same = ", the same for all runs" if after.run_variance == 0 else ""
            words = (
                f"rewards fell from {before.mean:.3f} to {after.mean:.3f}{same}. The update of "
                f"step {earlier[-1].step} likely went too far."
            )
            return _undone("reward", history, words, len(earlier) - 1 - ahead)
    return None


def _lengths(history: Sequence[StepRecord]) -> list[int]:
    """Window lengths: numbers of last steps, up to the fewest that hold `_FEWEST` groups."""
    found, groups = list[int](), 0
    while len(found) < len(history) - 1 and groups < _FEWEST:
        found.append(len(found) + 1)
        groups += history[-len(found)].groups
    return found


def _lowest(earlier: Sequence[StepRecord], length: int) -> float:
    samples = [_of_step(one) for one in earlier]
    windows = [samples[at : at + length] for at in range(max(1, len(samples) - length + 1))]
    return min((found.mean for one in windows if (found := _pool(one))), default=-math.inf)


def _unmoved(history: Sequence[StepRecord], policy: str, config: TrainConfig) -> Sign | None:
    found = _first_short(history, policy, config)
    if found is None or found[0] != history[-1].step:  # or it was said
        return None
    _, moved, rate = found
    bound = config.max_kl or 0.0
    better = rate * math.sqrt(0.5 * bound / moved)  # divergence is quadratic in the rate
    words = (
        f"step {history[-1].step}: {policy} hardly learns: most of the last {_STEPS_TO_MOVE} steps "
        f"moved it by {moved:.2g} nats a token or less (step_kl), max_kl={bound:g} allows "
        f"{bound / moved:.0f} times as much, and rewards did not rise."
    )
    entropies = [one.results[policy].metrics.get("entropy") for one in history]
    known = [one for one in entropies if one is not None]
    if known and known[-1] < DETERMINISTIC * known[0]:
        words += (
            f" It samples nearly the same every time: its entropy is {known[-1]:.2g} nats a token, "
            f"and was {known[0]:.2g}."
        )
        advice = (
            "A higher rate does not help. Go back to a version from before "
            "(`langchain-art checkpoints rollback`), with more scenarios a step (groups_per_step), "
            "an entropy_bonus, or rewards of its own calls."
        )
        return Sign("unmoved", words, None, advice)
    advice = (
        f"Its learning_rate, {rate:.2g}, rises with each such step; to begin higher, name "
        f"TrainConfig(learning_rate={better:.1g})."
        if config.learning_rate is None
        else f"Its learning_rate, {rate:.2g}, is too low: name {better:.1g}, or none, and it rises "
        "until steps are long enough."
    )
    return Sign("unmoved", words, None, advice)


def _first_short(
    history: Sequence[StepRecord], policy: str, config: TrainConfig
) -> tuple[int, float, float] | None:
    """The first step that ends too short ones, their median divergence, and its learning rate."""
    if config.max_kl is None:
        return None
    told = [
        (number, metrics["step_kl"], metrics["learning_rate"])
        for number, one in enumerate(history, 1)
        if (metrics := one.results[policy].metrics).get("step_kl")
        and one.step > config.schedule.warmup_steps
    ]
    for end in range(_STEPS_TO_MOVE, len(told) + 1):
        moved = statistics.median(moved for _, moved, _ in told[end - _STEPS_TO_MOVE : end])
        number, _, rate = told[end - 1]
        if moved < _MOVED * config.max_kl and not _rose(history[:number]):
            return history[number - 1].step, moved, rate
    return None


def _rose(history: Sequence[StepRecord]) -> bool:
    before, after = _of_step(history[0]), _pool([_of_step(one) for one in history[1:]])
    if before is None or after is None:
        return False
    return intervals.welch(*((one.mean, one.variance, one.n) for one in (before, after))) > _RISE


def _flat(history: Sequence[StepRecord], ahead: int) -> Sign | None:
    flat = 0
    while flat < min(len(history), WINDOW) and _all_flat(history[-1 - flat]):
        flat += 1
    if flat < 2:
        return None
    step, reward = history[-1].step, history[-1].reward_mean
    words = f"all groups of {flat} steps had zero variance, at the reward {reward:.3f}, so nothing "
    words += "was learned."
    if (peak := _peak(history, flat)) is not None:
        words += f" The policy is worse than in step {history[peak].step}: it has collapsed."
        return _undone("flat", history, words, peak - ahead)
    if _entropy_gone(history) is not None:
        words += " The policy samples nearly the same every time."
    advice = (
        "Its scenarios are all too hard or all too easy for it: take others, or "
        "Trainer(dynamic_sampling_rounds=…). If this is the reward that you want, it is done."
    )
    if history[-1].reward_std:
        advice = (
            "It earns the same in each run of a scenario, in some more than in others: it hardly "
            "explores. Trainer(dynamic_sampling_rounds=…) looks for scenarios in which runs still "
            "differ, a larger group_size for seldom replies; a warm start shows it others."
        )
    return Sign("flat", f"step {step}: {words}", None, advice)


def _entropy(history: Sequence[StepRecord], ahead: int) -> Sign | None:
    if (gone := _entropy_gone(history)) is None or (peak := _peak(history, 1)) is None:
        return None
    now, first = gone
    words = (
        f"the entropy is {now:.3g} nats a token, and was {first:.3g} in the first step: the policy "
        f"samples nearly the same every time, and rewards fell below those of step "
        f"{history[peak].step}."
    )
    return _undone("entropy", history, words, peak - ahead)


def _truncated(history: Sequence[StepRecord], ahead: int) -> Sign | None:
    now, first = (_metric(one, "truncated_share") for one in (history[-1], history[0]))
    if now is None or first is None or now < _MOSTLY or first >= _SELDOM:
        return None
    words = (
        f"{now:.0%} of the replies are cut off at max_tokens, {first:.0%} were in the first step: "
        "replies grow."
    )
    if (peak := _peak(history, 1)) is not None:
        words += f" Rewards fell below those of step {history[peak].step}."
        return _undone("truncated", history, words, peak - ahead)
    advice = "A larger max_tokens, or TrainConfig(overlong=OverlongPenalty(…))."
    return Sign("truncated", f"step {history[-1].step}: {words}", None, advice)


def _undone(kind: str, history: Sequence[StepRecord], words: str, keep: int) -> Sign:
    """A sign that calls for going back. The last good step's runs came from the version `keep`."""
    keep = max(0, keep)
    back = names_of(history[keep - 1].versions) if keep else "the version that the fit began with"
    return Sign(kind, f"step {history[-1].step}: {words}", keep, _back_to(back))


def _back_to(version: str) -> str:
    return (
        f"Roll back to {version} (`langchain-art checkpoints rollback`), and go on with a lower "
        "learning_rate, fewer optimizer_steps or a KLPenalty."
    )


def _all_flat(record: StepRecord) -> bool:
    flat = (one.excluded.get("groups.zero_variance", 0) for one in record.results.values())
    return record.groups > 0 and record.reward_mean is not None and min(flat) >= record.groups


def _entropy_gone(history: Sequence[StepRecord]) -> tuple[float, float] | None:
    now, first = (_metric(one, "entropy") for one in (history[-1], history[0]))
    return (now, first) if now is not None and first and now < DETERMINISTIC * first else None


def _metric(record: StepRecord, name: str) -> float | None:
    """The largest of all policies; None if it was not measured."""
    metrics: list[Mapping[str, float]] = [one.metrics for one in record.results.values()]
    return max((one[name] for one in metrics if name in one), default=None)


def names_of(versions: Mapping[str, int]) -> str:
    """Each policy's version: ``writer@3 and critic@2``."""
    return " and ".join(f"{policy}@{version}" for policy, version in versions.items())


def no_gain(evals: Sequence[EvalResult], patience: int) -> str | None:
    """Reason to stop early: the last `patience` evaluations gained nothing; None: go on.

    An evaluation is a gain if its mean is above that of the last gain, at first of the first
    evaluation, by what is clear of chance (`clear_of_chance`). Both are of the same scenarios, so
    that the true interval is narrower; small gains add up until they are one.
    """
    scored = [one for one in evals if one.mean is not None and one.ci95 is not None]
    if not scored:
        return None
    best, since = scored[0], 0
    for one in scored[1:]:
        gain = (one.mean or 0.0) - (best.mean or 0.0)
        gained = intervals.clear_of_chance(gain, best.ci95, one.ci95)
        best, since = (one, 0) if gained else (best, since + 1)
    if since < patience:
        return None
    return (
        f"no further gain in {since} evaluations (stop_early={patience}): since step {best.step}, "
        f"{best}, none was better by more than the 95 % interval of the difference; the last is "
        f"{scored[-1]}."
    )


#: Of a fall that is taken for one: its probability by chance within a fit, and at its end.
WITHIN, AT_END = 1e-3, 1e-2


def held_out_sign(
    evals: Sequence[EvalResult], history: Sequence[StepRecord], *, at_end: bool = False
) -> Sign | None:
    """The sign that the last evaluation is below the best one, whose steps it keeps; or None.

    Each held-out scenario that both have is a pair: its mean reward then and now. If the version is
    no worse, each difference is as likely to have the other sign
    (`statistics.intervals.sign_flip_tail`); that the best of several earlier evaluations was chosen
    is corrected for (Bonferroni). Differences of single scenarios vary less than rewards do, so a
    fall is seen that all steps' rewards hide.

    A false alarm within a fit costs steps and learning rate; `at_end` of it only that it ends on an
    earlier version which is as good. So there are two levels, `WITHIN` and `AT_END`.
    """
    scored = [one for one in evals if one.mean is not None]
    earlier = [one for one in scored if one.versions != scored[-1].versions]
    if (best := best_of_evals(earlier)) is None:
        return None
    last = scored[-1]
    shared = best.scenarios.keys() & last.scenarios.keys()
    changes = [last.scenarios[name] - best.scenarios[name] for name in sorted(shared)]
    probability = len(earlier) * intervals.sign_flip_tail([-change for change in changes])
    if probability >= (AT_END if at_end else WITHIN):
        return None
    fell, rose = sum(one < 0 for one in changes), sum(one > 0 for one in changes)
    words = (
        f"step {last.step}: held-out reward fell from {best.mean:.3f} ({best.version}) to "
        f"{last.mean:.3f} ({last.version}): {fell} scenarios fell and {rose} rose, which chance "
        f"alone gives with probability {max(probability, 1e-9):.1g}. An update since step "
        f"{best.step or 0} likely went too far, or the policy learned what only the training "
        "scenarios reward."
    )
    keep = sum(one.step <= (best.step or 0) for one in history)
    return Sign("held_out", words, keep, _back_to(best.version))
