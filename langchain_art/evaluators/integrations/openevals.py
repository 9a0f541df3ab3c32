"""RULER and any other evaluator in the convention of ``openevals`` and ``agentevals``.

An evaluator is a function ``(*, inputs=None, outputs, reference_outputs=None)`` that returns
``{"key", "score", "comment", "metadata"}``. If `outputs` is a list with one item per run, the runs
are scored as one group, and the results are a list in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeAlias

from langchain_core.language_models import BaseChatModel

from langchain_art.errors import ConfigError
from langchain_art.evaluators.base import Score, as_evaluator, run_sync
from langchain_art.evaluators.integrations.convert import as_group, candidates, is_single
from langchain_art.evaluators.ruler.evaluator import RulerEvaluator
from langchain_art.evaluators.scoring import Evaluator

Result: TypeAlias = "dict[str, Any]"
"""``openevals.types.EvaluatorResult``; the score is None if the run could not be scored."""
Results: TypeAlias = "Result | list[Result]"


def create_ruler(
    *,
    judge: BaseChatModel | None = None,
    model: str | None = None,
    feedback_key: str = "ruler",
    **options: Any,
) -> Callable[..., Results]:
    """RULER as an openevals evaluator, created as by ``create_llm_as_judge``.

    Example::

        ruler = create_ruler(model="openai/o3")
        ruler(inputs=question, outputs=[run_of_old, run_of_new])
        # [{"key": "ruler", "score": 0.2, "comment": "…", …}, {"key": "ruler", "score": 0.9, …}]

    Args:
        judge: a chat model.
        model: a model's name, as litellm writes it, instead of `judge`.
        feedback_key: the results' key.
        options: of `RulerEvaluator`: ``rubric``, ``passes``, ``cache`` …

    Raises:
        ConfigError: both or neither of `judge` and `model`, or options that make no sense.
    """
    return _synchronous(
        create_async_ruler(judge=judge, model=model, feedback_key=feedback_key, **options)
    )


def create_async_ruler(
    *,
    judge: BaseChatModel | None = None,
    model: str | None = None,
    feedback_key: str = "ruler",
    **options: Any,
) -> Callable[..., Coroutine[Any, Any, Results]]:
    """As `create_ruler`; the evaluator is asynchronous."""
    asked = judge if judge is not None else model
    if asked is None or (judge is not None and model is not None):
        raise ConfigError(
            f"got {judge=}, {model=}, expected one of them: a chat model, or a model's name"
        )
    return async_openevals_evaluator(RulerEvaluator(asked, key=feedback_key, **options))


def openevals_evaluator(evaluator: Evaluator) -> Callable[..., Results]:
    """Any evaluator (a `GroupEvaluator`, or a function that a `Trainer` takes) for openevals.

    Example::

        judge = openevals_evaluator(WeightedCriteriaEvaluator(weights={"accuracy": 1.0}))
        judge(inputs=question, outputs=messages, reference_outputs={"answer": "14 March"})
    """
    return _synchronous(async_openevals_evaluator(evaluator))


def async_openevals_evaluator(evaluator: Evaluator) -> Callable[..., Coroutine[Any, Any, Results]]:
    """As `openevals_evaluator`; the evaluator is asynchronous."""
    judge = as_evaluator(evaluator)

    async def evaluate(
        *, inputs: Any = None, outputs: Any, reference_outputs: Any = None, **_: Any
    ) -> Results:
        group = as_group(candidates(outputs), inputs=inputs, reference=reference_outputs)
        found = [_result(judge.key, score) for score in await judge.ascore(group)]
        return found[0] if is_single(outputs) else found

    return evaluate


def _synchronous(evaluate: Callable[..., Coroutine[Any, Any, Results]]) -> Callable[..., Results]:
    @wraps(evaluate)
    def evaluate_synchronously(**given: Any) -> Results:
        return run_sync(evaluate(**given))

    return evaluate_synchronously


def _result(key: str, score: Score | None) -> Result:
    if score is None:
        return {"key": key, "score": None, "comment": "could not be scored", "metadata": None}
    metadata = {"parts": dict(score.parts)} if score.parts else None
    return {"key": key, "score": score.value, "comment": score.explanation, "metadata": metadata}
