"""Evaluators made of evaluators: sum, gate, fallback and vote.

Each takes `GroupEvaluator`s and plain functions, and is a `GroupEvaluator` itself, so they nest.
The scores of all parts are in `Score.parts`, and so in the run's scores: ``scores["sum/ruler"]``. A
missing score is never guessed. `own_rewards` gives the rewards that the runs already
have: ``SumEvaluator([(ruler, 0.5), (own_rewards, 0.5)])``.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from langchain_art.errors import ConfigError, JudgeError
from langchain_art.evaluators.base import GroupEvaluator, Score, as_evaluator
from langchain_art.evaluators.scoring import Evaluator
from langchain_art.wire import TrajectoryGroup

_Scores = Sequence[Score | None]


class SumEvaluator(GroupEvaluator):
    """A run's score is the weighted sum of its parts' scores.

    A run without a score from one part has none, and a part that raises leaves the group unjudged.

    Example::

        SumEvaluator([(RulerEvaluator("openai/o3"), 0.7), (WeightedCriteriaEvaluator(), 0.3)])

    Args:
        parts: evaluators with their weights: finite, not normalised, negative for a penalty.
        key: the score's name.

    Raises:
        ConfigError: no part, one that is no pair, two of one name, or a weight that is not finite.
    """

    def __init__(self, parts: Sequence[tuple[Evaluator, float]], key: str = "sum") -> None:
        super().__init__(key)
        try:
            pairs = [(part, float(weight)) for part, weight in parts]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"got {parts!r:.200}, expected pairs (evaluator, weight)") from error
        self.parts = _named([part for part, _ in pairs])
        self.weights = dict(zip(self.parts, (weight for _, weight in pairs), strict=True))
        if not all(math.isfinite(weight) for weight in self.weights.values()):
            raise ConfigError(f"got weights {self.weights}, expected finite numbers")

    async def ascore(self, group: TrajectoryGroup) -> list[Score | None]:
        """All parts at once, then the sums."""
        found, failed = await _ask(self.parts, group)
        if failed:
            raise next(iter(failed.values()))
        return _merged(found, self._total)

    def _total(self, by: Mapping[str, Score]) -> float | None:
        if len(by) < len(self.parts):
            return None
        return math.fsum(self.weights[name] * score.value for name, score in by.items())


class GateEvaluator(GroupEvaluator):
    """Scores with `then` the runs whose score by `gate` is at least `at_least`.

    `then` scores these as one group; the others score 0. A run that the gate could not score has
    no score.

    Example::

        GateEvaluator(tests_pass, RulerEvaluator("openai/o3"))     # 0.0 unless the tests pass

    Args:
        gate: scores every run.
        then: scores those that pass; it is not called if none does.
        at_least: the lowest score that passes.
        key: the score's name.

    Raises:
        ConfigError: `at_least` is not finite, or both evaluators have one name.
    """

    def __init__(
        self, gate: Evaluator, then: Evaluator, *, at_least: float = 0.5, key: str = "gate"
    ) -> None:
        super().__init__(key)
        if not math.isfinite(at_least):
            raise ConfigError(f"got {at_least=}, expected a finite number")
        self.gate, self.then = _named([gate, then]).values()
        self.at_least = at_least

    async def ascore(self, group: TrajectoryGroup) -> list[Score | None]:
        """The gate first; then, of the runs that it lets through, the other's scores."""
        at_gate = await self.gate.scores_of(group)
        passed = [n for n, s in enumerate(at_gate) if s is not None and s.value >= self.at_least]
        scores = [self._stopped(score) for score in at_gate]
        if passed:
            runs = tuple(group.trajectories[n] for n in passed)
            shown = group.model_copy(update={"trajectories": runs})
            for n, score in zip(passed, await self.then.scores_of(shown), strict=True):
                scores[n] = self._behind(at_gate[n], score)
        return scores

    def _stopped(self, score: Score | None) -> Score | None:
        if score is None:
            return None
        why = f"{self.gate.key} is {score.value:g}, below {self.at_least:g}. {score.explanation}"
        return Score(0.0, why.strip(), score.named(self.gate.key))

    def _behind(self, gate: Score | None, then: Score | None) -> Score | None:
        if gate is None or then is None:
            return None
        parts = gate.named(self.gate.key) | then.named(self.then.key)
        return Score(then.value, then.explanation, parts)


class FallbackEvaluator(GroupEvaluator):
    """Calls one evaluator after another until one scores every run of the group.

    Scores of several evaluators are never mixed within a group, since they are relative. If none
    scores every run, the first that scored any run counts.

    Example::

        FallbackEvaluator([RulerEvaluator("openai/o3"), WeightedCriteriaEvaluator()])

    Args:
        evaluators: in the order in which they are called.
        key: the score's name.

    Raises:
        ConfigError: no evaluator, or two of one name. A `ConfigError` of an evaluator is a fault of
            the program, so it is raised, and the next evaluator is not asked.
        JudgeError: when scoring, all of them raised; the message has each one's reason.
    """

    def __init__(self, evaluators: Sequence[Evaluator], key: str = "fallback") -> None:
        super().__init__(key)
        self.evaluators = _named(evaluators)

    async def ascore(self, group: TrajectoryGroup) -> list[Score | None]:
        """The scores of the first evaluator that scores the whole group."""
        partial: list[Score | None] | None = None
        failed = dict[str, Exception]()
        for name, evaluator in self.evaluators.items():
            found, errors = await _ask({name: evaluator}, group)
            failed |= errors
            for scores in found.values():
                marked = [
                    s and Score(s.value, f"{name}: {s.explanation}".rstrip(": "), s.named(name))
                    for s in scores
                ]
                if None not in marked:
                    return marked
                if partial is None and any(marked):
                    partial = marked
        if partial is None:
            raise JudgeError(f"{self.key}: no evaluator scored {group.id!r}. {_reasons(failed)}")
        return partial


class VoteEvaluator(GroupEvaluator):
    """The median of several judges' scores of each run.

    Example::

        VoteEvaluator([RulerEvaluator(f"openai/{m}", key=m) for m in ("o3", "gpt-5")])

    Args:
        judges: at least two; they are called concurrently.
        quorum: number of judges that have to score a run. None: more than half.
        key: the score's name.

    Raises:
        ConfigError: fewer than two judges, two of one name, a quorum out of range, or an evaluator
            that raises one.
        JudgeError: when scoring, fewer judges than the quorum scored the group.
    """

    def __init__(
        self, judges: Sequence[Evaluator], *, quorum: int | None = None, key: str = "vote"
    ) -> None:
        super().__init__(key)
        self.judges = _named(judges)
        self.quorum = len(judges) // 2 + 1 if quorum is None else quorum
        if len(judges) < 2 or not 1 <= self.quorum <= len(judges):
            raise ConfigError(
                f"got {len(judges)} judges, {quorum=}, expected at least two judges, and a quorum "
                "from 1 to as many"
            )

    async def ascore(self, group: TrajectoryGroup) -> list[Score | None]:
        """All judges at once, then the vote on each run."""
        found, failed = await _ask(self.judges, group)
        if len(found) < self.quorum:
            raise JudgeError(
                f"{self.key}: {len(found)} of {len(self.judges)} judges scored {group.id!r}, "
                f"expected {self.quorum}. {_reasons(failed)}"
            )
        return _merged(found, self._counted)

    def _counted(self, by: Mapping[str, Score]) -> float | None:
        if len(by) < self.quorum:
            return None
        return statistics.median(score.value for score in by.values())


def _named(evaluators: Sequence[Evaluator]) -> dict[str, GroupEvaluator]:
    found = [as_evaluator(evaluator) for evaluator in evaluators]
    names = [evaluator.key for evaluator in found]
    if not found or len(set(names)) < len(names):
        raise ConfigError(
            f"got evaluators named {names}, expected at least one and no name twice; give each a "
            "key= of its own"
        )
    return dict(zip(names, found, strict=True))


async def _ask(
    evaluators: Mapping[str, GroupEvaluator], group: TrajectoryGroup
) -> tuple[dict[str, _Scores], dict[str, Exception]]:
    """Scores by evaluator, and errors of those that raised; raises a `ConfigError` of any."""
    calls = (evaluator.scores_of(group) for evaluator in evaluators.values())
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    found, failed = dict[str, _Scores](), dict[str, Exception]()
    for name, outcome in zip(evaluators, outcomes, strict=True):
        if not isinstance(outcome, BaseException):
            found[name] = outcome
        elif isinstance(outcome, Exception) and not isinstance(outcome, ConfigError):
            failed[name] = outcome
        else:
            raise outcome
    return found, failed


def _merged(
    found: Mapping[str, _Scores], value: Callable[[Mapping[str, Score]], float | None]
) -> list[Score | None]:
    """Merge scores by evaluator with `value`, for each run; None: no score."""
    merged: list[Score | None] = []
    for scores in zip(*found.values(), strict=True):
        by = {name: s for name, s in zip(found, scores, strict=True) if s is not None}
        words = [f"{name} {s.value:.2f}: {s.explanation}".rstrip(": ") for name, s in by.items()]
        parts = dict(part for name, s in by.items() for part in s.named(name).items())
        total = value(by)
        merged.append(None if total is None else Score(total, " | ".join(words), parts))
    return merged


def _reasons(failed: Mapping[str, Exception]) -> str:
    reasons = (f"{name}: {type(error).__name__}: {error}" for name, error in failed.items())
    return "; ".join(reasons) or "None of them raised: they left every run without a score."
