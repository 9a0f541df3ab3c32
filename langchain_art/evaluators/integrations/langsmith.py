"""Evaluators for LangSmith's ``evaluate`` and ``evaluate_comparative``.

Each is made of a `GroupEvaluator`, or of a function that a `Trainer` takes. A `GroupEvaluator` may
also be given to LangSmith as it is (`by_name`). LangSmith takes plain
functions as evaluators, so this module does not import it. Formats:
`docs.langchain.com/langsmith/code-evaluator` and ``…/evaluate-pairwise``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_art.errors import ConfigError
from langchain_art.evaluators.base import Score, as_evaluator
from langchain_art.evaluators.integrations.convert import as_group
from langchain_art.evaluators.scoring import Evaluator

_log = logging.getLogger(__name__)


def row_evaluator(
    evaluator: Evaluator, *, candidates: str | None = None
) -> Callable[..., dict[str, Any]]:
    """An evaluator of single rows, for ``evaluate(target, data, evaluators=[...])``.

    Each run is a group of one: use an evaluator with absolute scores. With `candidates` the target
    returns a list of answers, which are one group, and the scores are called ``ruler_1``,
    ``ruler_2`` …

    Example::

        langsmith.evaluate(target, data, evaluators=[row_evaluator(WeightedCriteriaEvaluator())])

    Args:
        evaluator: of the group.
        candidates: the key of the target's outputs with the list of answers. None: one answer.

    Returns:
        A function that returns ``{"results": [{"key", "score", "comment"}, …]}``: the score, and
        its parts as ``key/part``. The score is None if the run could not be scored; if the
        evaluator raised, the comment is its error, as LangSmith itself reports one.
    """
    judge = as_evaluator(evaluator)

    def evaluate_row(
        inputs: dict[str, Any], outputs: dict[str, Any], reference_outputs: dict[str, Any] | None
    ) -> dict[str, Any]:
        runs = [_unwrapped(outputs)] if candidates is None else list(outputs[candidates])
        group = as_group(runs, inputs=_unwrapped(inputs), reference=reference_outputs)
        try:
            scores = judge.score(group)
        except Exception as error:  # noqa: BLE001 - LangSmith would file it under another name
            _log.error("%s raised %r", judge.key, error)
            failed = {"score": None, "comment": repr(error), "extra": {"error": True}}
            return {"results": [{"key": judge.key, **failed}]}
        results: list[dict[str, Any]] = []
        for number, score in enumerate(scores, start=1):
            key = judge.key if candidates is None else f"{judge.key}_{number}"
            results += _feedback(key, score)
        return {"results": results}

    evaluate_row.__name__ = judge.key
    return evaluate_row


def comparative_evaluator(evaluator: Evaluator) -> Callable[..., dict[str, Any]]:
    """An evaluator of all runs of an example, for ``evaluate_comparative(experiments, [...])``.

    The runs of two or more experiments, or the repetitions of one experiment, are one group.

    Example::

        evaluate_comparative(["base", "agent@17"], [comparative_evaluator(RulerEvaluator(judge))])

    Returns:
        A function that returns ``{"key", "scores": {run id: score}, "comment": {run id: why}}``,
        without the runs that could not be scored. Of a group that could not be judged there are no
        scores, and the comment is the judge's error: LangSmith gives up all examples if one raises.
    """
    judge = as_evaluator(evaluator)

    def compare_runs(runs: Sequence[Any], example: Any) -> dict[str, Any]:
        group = as_group(
            [_unwrapped(run.outputs) for run in runs],
            inputs=_unwrapped(example.inputs) if example is not None else None,
            reference=example.outputs if example is not None else None,
            run_ids=[str(run.id) for run in runs],
        )
        try:
            found = zip(runs, judge.score(group), strict=True)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - of any judge
            _log.error("%s raised %r", judge.key, error)
            return {"key": judge.key, "scores": {}, "comment": repr(error)}
        scored = {run.id: score for run, score in found if score is not None}
        return {
            "key": judge.key,
            "scores": {id: score.value for id, score in scored.items()},
            "comment": {str(id): score.explanation for id, score in scored.items()},
        }

    compare_runs.__name__ = judge.key
    return compare_runs


def _feedback(key: str, score: Score | None) -> list[dict[str, Any]]:
    if score is None:
        return [{"key": key, "score": None, "comment": "could not be scored"}]
    parts = [{"key": f"{key}/{name}", "score": part} for name, part in score.parts.items()]
    return [{"key": key, "score": score.value, "comment": score.explanation or None}, *parts]


def _unwrapped(value: Any) -> Any:
    """The value in LangSmith's ``{"output": value}`` or ``{"input": value}``, else as given."""
    if isinstance(value, Mapping) and len(value) == 1:
        only = next(iter(value))
        return value[only] if only in ("output", "input") else value
    return value
