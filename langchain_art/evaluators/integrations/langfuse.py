"""Evaluators for Langfuse's ``run_experiment`` (its SDK, version 5).

Each is made of a `GroupEvaluator`, or of a function that a `Trainer` takes. A `GroupEvaluator` may
also be given to Langfuse as it is (`by_name`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from langchain_art.errors import ConfigError
from langchain_art.evaluators.base import Score, as_evaluator
from langchain_art.evaluators.integrations.convert import as_group
from langchain_art.evaluators.scoring import Evaluator
from langchain_art.tracing.message_log import jsonable

if TYPE_CHECKING:
    from langfuse import Evaluation, Langfuse

_AT_ONCE = 16
_log = logging.getLogger(__name__)


def item_evaluator(evaluator: Evaluator) -> Callable[..., Awaitable[list[Evaluation]]]:
    """An evaluator of single items, for ``run_experiment(evaluators=[...])``.

    Each item's output is a group of one: use an evaluator with absolute scores.

    Example::

        client.run_experiment(name="mails", data=data, task=task,
                              evaluators=[item_evaluator(WeightedCriteriaEvaluator())])

    Returns:
        A function that returns the score and its parts (``key/part``), or an empty list if the
        output could not be scored.
    """
    judge = as_evaluator(evaluator)

    async def evaluate_item(
        *, input: Any, output: Any, expected_output: Any = None, **_: Any
    ) -> list[Evaluation]:
        group = as_group([output], inputs=input, reference=expected_output)
        (score,) = await judge.scores_of(group)
        return [] if score is None else _evaluations(judge.key, score)

    evaluate_item.__name__ = judge.key
    return evaluate_item


def run_evaluator(
    evaluator: Evaluator, client: Langfuse | None = None
) -> Callable[..., Awaitable[list[Evaluation]]]:
    """An evaluator of a whole run, for ``run_experiment(run_evaluators=[...])``.

    Items with the same input are the runs of one group: repeat each item in `data` to run it
    several times. Each item's score is added to its evaluations and, with a `client`, to its trace.

    Example::

        client.run_experiment(name="mails", data=data * 4, task=task,
                              run_evaluators=[run_evaluator(RulerEvaluator(judge), client)])

    Args:
        evaluator: of the groups.
        client: writes the scores to the items' traces. None: they stay in the result.

    Returns:
        A function that returns the mean score (``key_mean``) and the mean difference between the
        best and the worst run of a group (``key_spread``). At most 16 groups are judged at once.
        A group that cannot be judged is logged, counted in the comments, and leaves the others'
        scores; the judge's error is raised if no group can be, and a `ConfigError` in any case.
    """
    judge = as_evaluator(evaluator)

    async def evaluate_run(*, item_results: Sequence[Any], **_: Any) -> list[Evaluation]:
        groups = _by_input(item_results)
        slots = asyncio.Semaphore(_AT_ONCE)

        async def judged(results: Sequence[Any]) -> Sequence[Score | None]:
            outputs, item = [result.output for result in results], results[0].item
            asked, right = _of(item, "input"), _of(item, "expected_output")
            async with slots:
                return await judge.scores_of(as_group(outputs, inputs=asked, reference=right))

        outcomes = await asyncio.gather(*map(judged, groups), return_exceptions=True)
        errors = [one for one in outcomes if isinstance(one, BaseException)]
        for error in errors:
            of_group = isinstance(error, Exception) and not isinstance(error, ConfigError)
            if len(errors) == len(groups) or not of_group:
                raise error
            _log.error("%s could not judge a group: %s: %s", judge.key, type(error).__name__, error)
        found: list[list[float]] = []
        for results, scores in zip(groups, outcomes, strict=True):
            if isinstance(scores, BaseException):
                continue
            for result, score in zip(results, scores, strict=True):
                if score is not None:
                    _keep(result, _evaluations(judge.key, score), client)
            found.append([score.value for score in scores if score is not None])
        return _summary(judge.key, [values for values in found if values], len(groups))

    evaluate_run.__name__ = judge.key
    return evaluate_run


def _by_input(item_results: Sequence[Any]) -> list[list[Any]]:
    groups: dict[str, list[Any]] = {}
    for result in item_results:
        asked = json.dumps(jsonable(_of(result.item, "input")), sort_keys=True)
        groups.setdefault(asked, []).append(result)
    return list(groups.values())


def _of(item: Any, field: str) -> Any:
    """A field of a local item (a mapping) or of a data set's item (an object)."""
    return item.get(field) if isinstance(item, Mapping) else getattr(item, field, None)


def _keep(result: Any, evaluations: Sequence[Evaluation], client: Langfuse | None) -> None:
    result.evaluations.extend(evaluations)
    if client is None or not result.trace_id:
        return
    for one in evaluations:
        value, trace = float(cast(float, one.value)), str(result.trace_id)
        client.create_score(trace_id=trace, name=one.name, value=value, comment=one.comment)


def _evaluations(key: str, score: Score) -> list[Evaluation]:
    from langfuse import Evaluation  # noqa: PLC0415 - optional

    whole = Evaluation(name=key, value=score.value, comment=score.explanation or None)
    return [whole, *(Evaluation(name=f"{key}/{name}", value=v) for name, v in score.parts.items())]


def _summary(key: str, found: Sequence[Sequence[float]], groups: int) -> list[Evaluation]:
    from langfuse import Evaluation  # noqa: PLC0415

    if not found:
        return []
    values = list(chain.from_iterable(found))
    words = f"{len(values)} runs scored, {len(found)} of {groups} groups"
    spread = fmean(max(group) - min(group) for group in found)
    return [
        Evaluation(name=f"{key}_mean", value=fmean(values), comment=words),
        Evaluation(name=f"{key}_spread", value=spread, comment=words),
    ]
