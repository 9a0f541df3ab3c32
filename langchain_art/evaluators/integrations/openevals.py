"""RULER and any other evaluator in the convention of ``openevals`` and ``agentevals``.

An evaluator is a function ``(*, inputs=None, outputs, reference_outputs=None)`` that returns
``{"key", "score", "comment", "metadata"}``. If `outputs` is a list with one item per run, the runs
are scored as one group, and the results are a list in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, cast

from langchain_core.runnables import Runnable

from langchain_art.errors import ConfigError
from langchain_art.evaluators.base import Score, as_evaluator, run_sync
from langchain_art.evaluators.integrations.convert import as_group, candidates, is_single
from langchain_art.evaluators.ruler.evaluator import RulerEvaluator
from langchain_art.evaluators.ruler.prompt import DEFAULT_RUBRIC
from langchain_art.evaluators.scoring import Evaluator

P = ParamSpec("P")
Result: TypeAlias = "dict[str, Any]"
"""``openevals.types.EvaluatorResult``; the score is None if the run could not be scored."""
Results: TypeAlias = "Result | list[Result]"

#: Fields of a prompt of openevals, and what stands for them in RULER's request.
_FIELDS = {
    "inputs": "(the task)",
    "outputs": "(the runs)",
    "reference_outputs": "(the reference in the task)",
}


def create_async_ruler(
    *,
    prompt: str = DEFAULT_RUBRIC,
    feedback_key: str = "ruler",
    judge: Runnable[Any, Any] | None = None,
    model: str | None = None,
    system: str | None = None,
    continuous: bool = True,
    choices: Sequence[float] | None = None,
    use_reasoning: bool = True,
    **options: Any,
) -> Callable[..., Coroutine[Any, Any, Results]]:
    """RULER as an asynchronous openevals evaluator, with ``create_llm_as_judge``'s parameters.

    `create_ruler` takes the same and gives a synchronous one.

    Example::

        ruler = create_ruler(prompt="The shortest right answer wins.", model="openai/o3")
        ruler(inputs=question, outputs=[run_of_old, run_of_new])
        # [{"key": "ruler", "score": 0.2, "comment": "…", …}, {"key": "ruler", "score": 0.9, …}]

    Args:
        prompt: the standards, in words. The fields ``{inputs}``, ``{outputs}`` and
            ``{reference_outputs}`` of a prompt of openevals become words for the parts of RULER's
            request, which shows them.
        feedback_key: the results' key.
        judge: a chat model, or another Runnable that answers messages.
        model: a model's name, as litellm writes it, instead of `judge`.
        system: put before `prompt`.
        continuous: False: the score is True from 0.5 on. (openevals' own default is False.)
        choices: the score is the nearest of these numbers.
        use_reasoning: False: without the explanation.
        options: of `RulerEvaluator`: ``passes``, ``cache``, ``timeout`` …

    Raises:
        ConfigError: both or neither of `judge` and `model`, or options that make no sense.
    """
    asked = judge if judge is not None else model
    if asked is None or (judge is not None and model is not None):
        raise ConfigError(
            f"got {judge=}, {model=}, expected one of them: a chat model, or a model's name"
        )
    if "rubric" in options:
        raise ConfigError("got rubric=, expected prompt=, as openevals calls it")
    if not isinstance(cast("object", prompt), str):
        raise ConfigError(f"got {prompt!r:.200} as the prompt, expected the standards as a text")
    if choices is not None and (not continuous or not choices):
        raise ConfigError(
            f"got {choices=}, {continuous=}, expected at least one number to choose, and "
            "continuous=True"
        )
    rubric = prompt if system is None else f"{system}\n\n{prompt}"
    for field, words in _FIELDS.items():
        rubric = rubric.replace(f"{{{field}}}", words)
    evaluate = async_openevals_evaluator(RulerEvaluator(asked, rubric, key=feedback_key, **options))

    def shaped(result: Result) -> Result:
        value: float | None = result["score"]
        changed: Result = {} if use_reasoning else {"comment": None}
        if value is not None and not continuous:
            changed["score"] = value >= 0.5
        elif value is not None and choices is not None:
            changed["score"] = min(choices, key=lambda choice: abs(choice - value))
        return result | changed

    @wraps(evaluate)
    async def evaluate_as_asked(**given: Any) -> Results:
        found = await evaluate(**given)
        return [shaped(one) for one in found] if isinstance(found, list) else shaped(found)

    return evaluate_as_asked


def _made_synchronous(
    create: Callable[P, Callable[..., Coroutine[Any, Any, Results]]],
) -> Callable[P, Callable[..., Results]]:
    @wraps(create)
    def created(*args: P.args, **options: P.kwargs) -> Callable[..., Results]:
        return _synchronous(create(*args, **options))

    return created


create_ruler = _made_synchronous(create_async_ruler)
"""Synchronous `create_async_ruler`, with its parameters."""


def openevals_evaluator(evaluator: Evaluator) -> Callable[..., Results]:
    """Any evaluator (a `GroupEvaluator`, or a function that a `Trainer` takes) for openevals.

    Example::

        judge = openevals_evaluator(WeightedCriteriaEvaluator(weights={"accuracy": 1.0}))
        judge(inputs=question, outputs=messages, reference_outputs={"answer": "14 March"})
    """
    return _synchronous(async_openevals_evaluator(evaluator))


def async_openevals_evaluator(evaluator: Evaluator) -> Callable[..., Coroutine[Any, Any, Results]]:
    """Asynchronous `openevals_evaluator`."""
    judge = as_evaluator(evaluator)

    async def evaluate(
        *, inputs: Any = None, outputs: Any, reference_outputs: Any = None, **_: Any
    ) -> Results:
        group = as_group(candidates(outputs), inputs=inputs, reference=reference_outputs)
        found = [_result(judge.key, score) for score in await judge.scores_of(group)]
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
