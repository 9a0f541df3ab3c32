"""Signs that a policy has collapsed, each with its likely cause and what to do.

Three of them, read from the records of the steps alone:

- ``reward``: the rewards fell in one step below all before, by more than chance explains, or to one
  and the same value for all runs;
- ``flat``: in two steps one after the other all groups had zero variance, so nothing was learned;
- ``truncated``: half of the replies or more are cut off at `max_tokens`, where less than a quarter
  was in the first step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from langchain_art.training.results import StepRecord

#: Standard errors of a step's mean reward, with one sample a group, that chance does not explain.
_ERRORS = 4.0
_MOSTLY, _SELDOM = 0.5, 0.25
#: Share of the first step's entropy below which a policy samples nearly the same every time.
_DETERMINISTIC = 0.1


def new_signs(history: Sequence[StepRecord]) -> list[str]:
    """What the last step shows that the one before did not; empty: nothing, or no step.

    Example::

        step 7: rewards fell from 0.702 to 0.000, the same for all runs. …
    """
    before = _signs(history[:-1])
    return [words for kind, words in _signs(history).items() if kind not in before]


def _signs(history: Sequence[StepRecord]) -> dict[str, str]:
    if not history:
        return {}
    found = {
        "reward": _reward(history),
        "flat": _flat(history),
        "truncated": _truncated(history),
    }
    step = history[-1].step
    return {kind: f"step {step}: {words}" for kind, words in found.items() if words}


def _reward(history: Sequence[StepRecord]) -> str | None:
    """The runs of a step were sampled by the version of the step before."""
    *earlier, last = history
    means = [one.reward_mean for one in earlier if one.reward_mean is not None]
    if not means or last.reward_mean is None or last.reward_mean >= min(means):
        return None
    same = last.reward_std == 0 and last.groups > 1
    spread = max(last.reward_std or 0.0, earlier[-1].reward_std or 0.0)
    chance = _ERRORS * spread * math.sqrt(2 / max(1, min(last.groups, earlier[-1].groups)))
    if not same and means[-1] - last.reward_mean <= chance:
        return None
    good = earlier[-2] if len(earlier) > 1 else None
    back = "to the version that the fit began with" if good is None else f"to {_names(good)}"
    return (
        f"rewards fell from {means[-1]:.3f} to {last.reward_mean:.3f}"
        f"{', the same for all runs' if same else ''}. The update of step {earlier[-1].step} "
        f"likely went too far: roll back {back} (`langchain-art checkpoints rollback`), and go on "
        "with a lower learning_rate or fewer optimizer_steps."
    )


def _flat(history: Sequence[StepRecord]) -> str | None:
    if len(history) < 2 or not all(map(_all_flat, history[-2:])):
        return None
    last = history[-1]
    drawn = f"all groups of two steps had zero variance, at the reward {last.reward_mean:.3f}."
    now, first = (_metric(one, "entropy") for one in (last, history[0]))
    if now is not None and first and now < _DETERMINISTIC * first:
        return (
            f"{drawn} The policy samples nearly the same every time: its entropy is {now:.3g} "
            f"nats a token, and was {first:.3g}. Roll back, and lower the learning_rate."
        )
    return (
        f"{drawn} Its scenarios are all too hard or all too easy for it: take others, or "
        "Trainer(dynamic_sampling_rounds=…)."
    )


def _truncated(history: Sequence[StepRecord]) -> str | None:
    now, first = (_metric(one, "truncated_share") for one in (history[-1], history[0]))
    if now is None or first is None or now < _MOSTLY or first >= _SELDOM:
        return None
    return (
        f"{now:.0%} of the replies are cut off at max_tokens, {first:.0%} were in the first step. "
        "Replies grow: a larger max_tokens, or TrainConfig(overlong=OverlongPenalty(…))."
    )


def _all_flat(record: StepRecord) -> bool:
    flat = (one.excluded.get("groups.zero_variance", 0) for one in record.results.values())
    return record.groups > 0 and record.reward_mean is not None and min(flat) >= record.groups


def _metric(record: StepRecord, name: str) -> float | None:
    """The largest of all policies; None if it was not measured."""
    metrics: list[Mapping[str, float]] = [one.metrics for one in record.results.values()]
    return max((one[name] for one in metrics if name in one), default=None)


def _names(record: StepRecord) -> str:
    return " and ".join(f"{policy}@{version}" for policy, version in record.versions.items())
