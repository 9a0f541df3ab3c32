"""The token losses in plain Python: float64, one token at a time."""

import math
from collections.abc import Sequence
from typing import Any

#: One token's loss, its derivative with respect to its own logprob (gspo: of the ratio's exponent),
#: and which bound acted.
Naive = tuple[float, float, str]


def naive_clip(
    new: float, old: float, a: float, low: float, high: float, dual: float | None
) -> Naive:
    ratio = math.exp(new - old)
    if a < 0 and dual is not None and ratio > dual:
        return -dual * a, 0.0, "high"
    if a > 0 and ratio > 1 + high:
        return -(1 + high) * a, 0.0, "high"
    if a < 0 and ratio < 1 - low:
        return -(1 - low) * a, 0.0, "low"
    return -ratio * a, -ratio * a, ""


def naive_cispo(new: float, old: float, a: float, low: float, high: float) -> Naive:
    ratio = math.exp(new - old)
    weight = min(max(ratio, 1 - low), 1 + high)
    bound = "low" if ratio < 1 - low else "high" if ratio > 1 + high else ""
    return -weight * a * new, -weight * a, bound


def naive_dppo(new: float, sampler: float, a: float, low: float, high: float) -> Naive:
    log_ratio, moved = new - sampler, math.exp(new) - math.exp(sampler)
    penalty, slope = 1e-3 * log_ratio**2, 2e-3 * log_ratio
    if a > 0 and moved > high:
        return penalty, slope, "high"
    if a < 0 and moved < -low:
        return penalty, slope, "low"
    ratio = math.exp(log_ratio)
    return -ratio * a + penalty, -ratio * a + slope, ""


def naive_gspo(
    new: list[float], old: list[float], a: list[float], calls: list[float], low: float, high: float
) -> list[Naive]:
    found = []
    for t, call in enumerate(calls):
        own = [k for k, other in enumerate(calls) if other == call]
        mean = math.fsum(new[k] - old[k] for k in own) / len(own)
        found.append(naive_clip(mean, 0.0, a[t], low, high, None))
    return found


def naive_losses(
    kind: str,
    new: list[float],
    old: list[float],
    a: list[float],
    calls: list[float],
    low: float,
    high: float,
    dual: float | None,
) -> list[Naive]:
    if kind == "gspo":
        return naive_gspo(new, old, a, calls, low, high)
    rows = zip(new, old, a, strict=True)
    if kind == "clip":
        return [naive_clip(*row, low, high, dual) for row in rows]
    naive = {"cispo": naive_cispo, "dppo_tv": naive_dppo}[kind]
    return [naive(*row, low, high) for row in rows]


def naive_importance(
    gaps: list[float], calls: Sequence[float], sampling: Any, guard: float | None
) -> list[tuple[float, bool, bool]]:
    """Of each token its weight, whether importance sampling limits it, and whether the guard."""
    kind = sampling.kind if sampling else "off"
    low, high = getattr(sampling, "low", None) or 0.0, sampling.high if sampling else math.inf
    found = []
    for gap, call in zip(gaps, calls, strict=True):
        own = [g for g, other in zip(gaps, calls, strict=True) if other == call]
        weight = math.exp(math.fsum(own) if kind == "sequence_mask" else gap)
        limited = not low <= weight <= high
        if kind in ("truncated", "off"):
            weight = min(weight, high) if kind == "truncated" else 1.0
        elif limited:
            weight = 0.0
        guarded = guard is not None and abs(math.fsum(own) / len(own)) > math.log(guard)
        found.append((0.0 if guarded else weight, limited, guarded))
    return found
