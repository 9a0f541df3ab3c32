"""Whether held-out rewards fell: the best earlier evaluation against the last one, in pairs.

Each held-out scenario is a pair: its mean reward then and now. If the version is no worse, each
difference is as likely to have the other sign (`statistics.intervals.sign_flip_tail`); that the
best of several earlier evaluations was chosen is corrected for (Bonferroni). Differences of single
scenarios vary less than rewards do, so that a fall is seen which is none of all steps' rewards.

A false alarm within a fit costs steps and learning rate; at its end only that it ends on an earlier
version which is as good. So there are two levels.
"""

from __future__ import annotations

from collections.abc import Sequence

from langchain_art.statistics.intervals import sign_flip_tail
from langchain_art.training.collapse.signs import SLOWER_ADVICE, Sign
from langchain_art.training.results.records import EvalResult, StepRecord

#: Of a fall that is taken for one: its probability by chance within a fit, and at its end.
WITHIN, AT_END = 1e-3, 1e-2


def held_out_sign(
    evals: Sequence[EvalResult], history: Sequence[StepRecord], *, at_end: bool = False
) -> Sign | None:
    """Whether the last evaluation is below the best one; it keeps the steps up to the best one.

    Args:
        evals: those of versions that were not rolled back, oldest first. Only scenarios that two of
            them share are compared (`EvalResult.scenarios`).
        history: the steps that were not rolled back, oldest first.
        at_end: whether the fit ends here: the level is 1e-2 then, else 1e-3.
    """
    scored = [one for one in evals if one.mean is not None]
    if not scored:
        return None
    last = scored[-1]
    earlier = [one for one in scored[:-1] if one.versions != last.versions]
    if not earlier:
        return None
    best = max(earlier, key=lambda one: (one.mean or 0.0, -(one.step or 0)))
    shared = best.scenarios.keys() & last.scenarios.keys()
    changes = [last.scenarios[name] - best.scenarios[name] for name in sorted(shared)]
    probability = len(earlier) * sign_flip_tail([-change for change in changes])
    if probability >= (AT_END if at_end else WITHIN):
        return None
    fell, rose = sum(one < 0 for one in changes), sum(one > 0 for one in changes)
    step = best.step or 0
    return Sign(
        "held_out",
        f"step {last.step}: held-out reward fell from {best.mean:.3f} ({best.version}) to "
        f"{last.mean:.3f} ({last.version}): {fell} scenarios fell and {rose} rose, which chance "
        f"alone gives with probability {max(probability, 1e-9):.1g}. An update since step {step} "
        "likely went too far, or the policy learned what only the training scenarios reward.",
        sum(one.step <= step for one in history),
        f"Roll back to {best.version} (`langchain-art checkpoints rollback`), and {SLOWER_ADVICE}.",
    )
