"""`WeightedCriteriaEvaluator`: weighted accuracy, efficiency, completeness and satisfaction."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from langchain_art.errors import ConfigError
from langchain_art.evaluators import run_facts
from langchain_art.evaluators.base import GroupEvaluator, Score
from langchain_art.wire import Trajectory, TrajectoryGroup

#: The default weights.
WEIGHTS: Mapping[str, float] = {
    "accuracy": 0.4,
    "efficiency": 0.3,
    "completeness": 0.2,
    "user_satisfaction": 0.1,
}
_A_MINUTE = 0.2  # of `satisfaction`, beyond half a minute
Scenario: TypeAlias = "Mapping[str, Any]"
Accuracy: TypeAlias = "Literal['exact', 'string', 'dict'] | Callable[[Any, Any], float]"


class WeightedCriteriaEvaluator(GroupEvaluator):
    """Scores each run by itself: a weighted sum of criteria in [0, 1].

    ``score = sum(weights[c] * c(run))``, with each criterion reported among the score's parts. A
    criterion whose weight is 0 is not computed.

    =====================  ==============================================================
    criterion              value, clamped to [0, 1]
    =====================  ==============================================================
    ``accuracy``           similarity of the answer to the expected one (`accuracy`)
    ``efficiency``         `efficiency` of `run_facts.steps` against `optimal_steps`
    ``completeness``       `completeness` of `run_facts.actions` against `required_actions`
    ``user_satisfaction``  `satisfaction` for `run_facts.errors`, and for `seconds` if given
    =====================  ==============================================================

    Example::

        criteria = WeightedCriteriaEvaluator()       # accuracy 0.8, user satisfaction 0.2
        criteria = WeightedCriteriaEvaluator(optimal_steps=3, required_actions=["search", "read"])
        Trainer(graph_model, evaluator=criteria)     # scenarios with a key "answer"

    Args:
        weights: criterion -> weight; not negative, with sum 1. A missing criterion has weight 0.
            None: `WEIGHTS`; if neither an option nor the scenario says what ``efficiency`` or
            ``completeness`` is measured against, that criterion is left out, and the other weights
            are divided by their sum.
        accuracy: ``"exact"`` (`exact`), ``"string"`` (`string_similarity`), ``"dict"``
            (`dict_similarity`), or a function of answer and expected answer.
        expected: the scenario's key of the expected answer, or a function of the scenario.
        answer: gives a run's answer.
        optimal_steps: model calls that a run needs, at least 1. None: the scenario's
            ``optimal_steps``.
        required_actions: names of tools that a run has to call. None: the scenario's
            ``required_actions``.
        errors: gives the number of a run's errors.
        seconds: gives a run's duration, such as `run_facts.seconds`; differences of up to a second
            count as none. None: time does not count, since equal runs differ in it.
        key: the score's name.

    Raises:
        ConfigError: weights or `optimal_steps` are out of range; when scoring, a scenario lacks a
            key that a criterion needs.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        accuracy: Accuracy = "exact",
        expected: str | Callable[[Scenario], Any] = "answer",
        answer: Callable[[Trajectory], Any] = run_facts.answer,
        optimal_steps: int | None = None,
        required_actions: Sequence[str] | None = None,
        errors: Callable[[Trajectory], float] = run_facts.errors,
        seconds: Callable[[Trajectory], float] | None = None,
        key: str = "criteria",
    ) -> None:
        super().__init__(key)
        self.weights = _checked(WEIGHTS if weights is None else weights)
        self._may_leave_out = weights is None
        if not callable(accuracy) and accuracy not in _MEASURES:
            raise ConfigError(
                f"got {accuracy=}, expected {', '.join(map(repr, _MEASURES))} or a function"
            )
        if optimal_steps is not None and optimal_steps < 1:
            raise ConfigError(f"got {optimal_steps=}, expected at least 1")
        completeness((), () if required_actions is None else required_actions)  # or it raises
        self._measure = accuracy if callable(accuracy) else _MEASURES[accuracy]
        self.expected, self._answer = expected, answer
        self.optimal_steps = optimal_steps
        self.required_actions = None if required_actions is None else tuple(required_actions)
        self._errors, self._seconds = errors, seconds
        if seconds is not None:
            weight = self._weights({}).get("user_satisfaction", 0.0)
            self.resolution = weight * _A_MINUTE / 60

    async def ascore(self, group: TrajectoryGroup) -> list[Score | None]:
        """The weighted sum for each run; `Score.parts` has the criteria."""
        scenario: Any = group.metadata.get("scenario")
        known = scenario if isinstance(scenario, Mapping) else {}
        weights = self._weights(known)
        return [self._score(run, known, weights) for run in group.trajectories]

    def _weights(self, scenario: Scenario) -> Mapping[str, float]:
        """The weights of the criteria that can be computed, with sum 1."""
        if not self._may_leave_out:
            return self.weights
        given = {"efficiency": self.optimal_steps, "completeness": self.required_actions}
        keys = {"efficiency": "optimal_steps", "completeness": "required_actions"}
        unknown = {c for c, key in keys.items() if given[c] is None and scenario.get(key) is None}
        left = {name: weight for name, weight in self.weights.items() if name not in unknown}
        total = math.fsum(left.values())
        return {name: weight / total for name, weight in left.items()}

    def _score(self, run: Trajectory, scenario: Scenario, weights: Mapping[str, float]) -> Score:
        criteria: dict[str, Callable[[Trajectory, Scenario], float]] = {
            "accuracy": self._accuracy,
            "efficiency": self._efficiency,
            "completeness": self._completeness,
            "user_satisfaction": self._satisfaction,
        }
        parts = {name: criteria[name](run, scenario) for name in weights}
        value = math.fsum(weights[name] * part for name, part in parts.items())
        words = ", ".join(f"{name} {part:.2f}" for name, part in parts.items())
        return Score(_clamped(value), words, parts)

    def _accuracy(self, run: Trajectory, scenario: Scenario) -> float:
        if callable(self.expected):
            right = self.expected(scenario)
        else:
            right = _required(scenario, "accuracy", self.expected, "expected")
        value = float(self._measure(self._answer(run), right))
        if not math.isfinite(value):
            raise ConfigError(f"accuracy= gave {value!r} for run {run.id!r}, expected 0 to 1")
        return _clamped(value)

    def _efficiency(self, run: Trajectory, scenario: Scenario) -> float:
        optimal = self.optimal_steps or _required(scenario, "efficiency", "optimal_steps")
        return efficiency(run_facts.steps(run), int(optimal))

    def _completeness(self, run: Trajectory, scenario: Scenario) -> float:
        required = self.required_actions
        if required is None:
            required = _required(scenario, "completeness", "required_actions")
        return completeness(run_facts.actions(run), required)

    def _satisfaction(self, run: Trajectory, scenario: Scenario) -> float:
        seconds = 0.0 if self._seconds is None else self._seconds(run)
        return satisfaction(self._errors(run), seconds)


def efficiency(steps: int, optimal: int) -> float:
    """``1`` up to the optimal steps, then ``1 - 0.5 * (steps - optimal) / optimal``, at least 0."""
    if optimal < 1:
        raise ConfigError(f"got {optimal} optimal steps, expected at least 1")
    return _clamped(1.0 - 0.5 * max(0, steps - optimal) / optimal)


def completeness(done: Sequence[str], required: Sequence[str]) -> float:
    """The share of the distinct required actions that were done; 1 if none is required."""
    if isinstance(required, str):  # whose letters would be names
        raise ConfigError(f"got required_actions={required!r:.100}, expected a list of names")
    wanted = set(required)
    return len(wanted & set(done)) / len(wanted) if wanted else 1.0


def satisfaction(errors: float, seconds: float) -> float:
    """``1 - 0.1 * errors - 0.2 * max(0, seconds - 30) / 60``, within [0, 1]."""
    return _clamped(1.0 - 0.1 * errors - _A_MINUTE * max(0.0, seconds - 30.0) / 60)


def exact(answer: Any, expected: Any) -> float:
    """1.0 if equal, else 0.0; texts are compared without leading and trailing white space."""
    if isinstance(answer, str) and isinstance(expected, str):
        return float(answer.strip() == expected.strip())
    return float(answer == expected)


def string_similarity(answer: Any, expected: Any) -> float:
    """``2 M / T``: M characters in matching blocks, of T in both (Ratcliff and Obershelp, 1988).

    The blocks are those of `difflib.SequenceMatcher` without its heuristic for long texts. Other
    values are compared as their ``str``, None as the empty text. Two empty texts give 1.0.
    """
    left, right = "" if answer is None else str(answer), str(expected)
    return difflib.SequenceMatcher(None, left, right, autojunk=False).ratio()


def dict_similarity(answer: Any, expected: Any) -> float:
    """The similarity of two JSON values, in [0, 1].

    Mappings: the mean over the union of their keys, 0 for a key that one lacks. Lists: the mean
    over the places of the longer one. Texts: `string_similarity`. Other values: 1 if equal, else 0.
    If a mapping or list is expected, a text is parsed as JSON first; invalid JSON gives 0.
    """
    if isinstance(answer, str) and isinstance(expected, Mapping | list):
        try:
            answer = json.loads(answer)
        except ValueError:
            return 0.0
    return _alike(answer, expected)


def _alike(left: Any, right: Any) -> float:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        shared = {key for key in left if key in right}
        alike = [_alike(left[k], right[k]) if k in shared else 0.0 for k in {**left, **right}]
        return sum(alike) / len(alike) if alike else 1.0
    if isinstance(left, list) and isinstance(right, list):
        longest = max(len(left), len(right))
        return sum(map(_alike, left, right)) / longest if longest else 1.0
    if isinstance(left, str) and isinstance(right, str):
        return string_similarity(left, right)
    # True equals 1 in Python, not in JSON.
    return float(left == right and isinstance(left, bool) == isinstance(right, bool))


_MEASURES: dict[str, Callable[[Any, Any], float]] = {
    "exact": exact,
    "string": string_similarity,
    "dict": dict_similarity,
}


def _checked(weights: Mapping[str, float]) -> dict[str, float]:
    unknown = sorted(set(weights) - set(WEIGHTS))
    if unknown:
        raise ConfigError(f"got weights for {unknown}, expected some of {list(WEIGHTS)}")
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"got the weight {weight!r} for {name!r}, expected 0 or more")
    total = math.fsum(weights.values())
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise ConfigError(
            f"got weights that add up to {total:g}, expected 1: {dict(weights)}. Divide each of "
            "them by their sum."
        )
    return {name: weights[name] for name in WEIGHTS if weights.get(name)}


#: See `scenarios.portable`, which leaves a scenario out.
_NO_SCENARIO = (
    "which in the group's metadata is empty, no mapping, or not there: one that is not JSON "
    "throughout (a NumPy number is not), or that is 64 kB or more, is left out as a whole"
)


def _required(scenario: Scenario, criterion: str, key: str, option: str = "") -> Any:
    if scenario.get(key) is None:
        found = f"which has {sorted(scenario)}" if scenario else _NO_SCENARIO
        raise ConfigError(
            f"{criterion} needs {key!r} of the scenario, {found}. Give the scenario that key, or "
            f"pass {option or key}=, or leave {criterion!r} out of the weights."
        )
    return scenario[key]


def _clamped(value: float) -> float:
    return max(0.0, min(1.0, value))
