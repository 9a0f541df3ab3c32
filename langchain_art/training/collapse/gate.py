"""`Trainer(gate=)`: a stated bound that a version has to meet on held-out scenarios to be kept.

`held_out` raises an alarm where a fall is certain; the gate is the stricter rule that is asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, cast

from langchain_art._callables import call
from langchain_art.errors import ConfigError
from langchain_art.statistics.comparison import compare_rewards
from langchain_art.training.collapse.signs import Sign
from langchain_art.training.results.records import EvalResult, StepRecord

Gate: TypeAlias = "Callable[[EvalResult, EvalResult], bool | Awaitable[bool]]"
"""Says whether a version is kept: given the best evaluation of those that were, and its own.

Plain or async. It may be asked again about an evaluation after a crash.
"""


def check_gate(gate: object) -> Gate | None:
    """`gate` as a function, or None for False; or ConfigError."""
    if gate is True:
        return not_below
    if gate is not False and not callable(gate):
        raise ConfigError(
            f"got gate={gate!r:.200}, expected True, False, or a function of two evaluations, the "
            "best and the new one, that returns True or False"
        )
    return cast("Gate", gate) if gate else None


def not_below(best: EvalResult, new: EvalResult) -> bool:
    """True if a version is below the best one by no more than the interval of the difference.

    The difference of the means and its 95 % interval are of pairs of scenarios where both have at
    least two of them (`statistics.comparison.compare_rewards`). Without a reward it is below.
    """
    rewards = [{name: [mean] for name, mean in one.scenarios.items()} for one in (best, new)]
    if not all(rewards):
        return (new.mean or 0.0) >= (best.mean or 0.0) if new.mean is not None else False
    found = compare_rewards(best.version, new.version, *rewards)
    return found.difference >= -(found.ci95 or 0.0)


async def gate_sign(
    gate: Gate | None, evals: Sequence[EvalResult], history: Sequence[StepRecord]
) -> Sign | None:
    """Sign of what is wrong with the last evaluated version; None: it is kept.

    Args:
        gate: None keeps all.
        evals: those of versions that were not rolled back, oldest first. A version that one of them
            let pass before is kept.
        history: the steps that were not rolled back, oldest first.

    Raises:
        ConfigError: the gate says neither True nor False.
    """
    *earlier, new = evals
    others = [one for one in earlier if one.mean is not None]
    if gate is None or not others or any(one.versions == new.versions for one in earlier):
        return None
    best = max(others, key=lambda one: (one.mean or 0.0, -(one.step or 0)))
    verdict = await call(gate, best, new)
    if verdict not in (True, False):
        raise ConfigError(
            f"gate= returned {verdict!r:.200} for {new.version}, expected True (it is kept) or "
            "False (it is rolled back)"
        )
    if verdict:
        return None
    step = best.step or 0
    rule = "" if gate is not not_below else ", by more than the 95 % interval of the difference"
    return Sign(
        "gate",
        f"step {new.step}: the gate did not let {new.version} pass: {new} held out, against {best} "
        f"of {best.version}, the best version that was kept{rule}.",
        sum(one.step <= step for one in history),
        "",
    )
