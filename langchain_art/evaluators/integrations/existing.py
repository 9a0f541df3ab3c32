"""Evaluators of LangSmith, openevals or Langfuse, as rewards of a `Trainer`.

Each scores one run at a time, by its output alone. Formats:
``docs.langchain.com/langsmith/code-evaluator`` and
``langfuse.com/docs/evaluation/experiments/experiments-via-sdk``.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import uuid4

from langchain_art._callables import call, is_async
from langchain_art.errors import ConfigError
from langchain_art.evaluators.base import GroupEvaluator, Score
from langchain_art.wire import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from langsmith.evaluation import RunEvaluator

log = logging.getLogger(__name__)
Outputs: TypeAlias = "Callable[[Trajectory], Any]"
"""Part of a run that an evaluator is shown."""
_Results: TypeAlias = "list[tuple[str, Any, str]]"
"""Name, value and comment of each result."""
#: Names under which LangSmith puts inputs, outputs and references that are no mappings.
_NAMES = ("input", "output", "output")
_Ask: TypeAlias = "Callable[[Any, Any, Any], Awaitable[_Results]]"
"""Takes inputs, output and reference of one run."""


def from_langsmith(
    evaluator: Callable[..., Any] | RunEvaluator,
    key: str | None = None,
    *,
    outputs: Outputs | None = None,
) -> GroupEvaluator:
    """The reward that an evaluator of LangSmith's ``evaluate``, or one of openevals, gives.

    It is called as LangSmith calls it (``inputs``, ``outputs``, ``reference_outputs``, or ``run``
    and ``example``), without being traced.

    Example::

        def correct(outputs, reference_outputs):
            return outputs["messages"][-1]["content"] == reference_outputs["answer"]

        Trainer(model, evaluator=from_langsmith(correct))

    Args:
        evaluator: a function, or a ``RunEvaluator``.
        key: which of its results is the reward, if it gives several; the others become parts of
            the score.
        outputs: what is shown as ``outputs``. None: what the graph returned, and
            ``{"output": …}`` around what is no mapping, as LangSmith does.

    Returns:
        An evaluator. True is 1.0; a run without a value, or without any result, is not scored.

    Raises:
        ConfigError: it is not callable, or, when it is used: a value is no number, or `key` names
            none of several results.
    """
    from langsmith import run_helpers, schemas  # noqa: PLC0415 - takes half a second
    from langsmith.evaluation import RunEvaluator, run_evaluator  # noqa: PLC0415

    judge = evaluator if isinstance(evaluator, RunEvaluator) else run_evaluator(_called(evaluator))
    # LangSmith's own `aevaluate_run` of a plain function waits for ever for one that raises
    # StopIteration.
    plain = type(judge).aevaluate_run is RunEvaluator.aevaluate_run
    evaluate = (
        judge.evaluate_run if plain or not getattr(judge, "is_async", True) else judge.aevaluate_run
    )

    async def ask(inputs: Any, output: Any, reference: Any) -> _Results:
        now, id = datetime.now(UTC), uuid4()
        given, shown, right = map(_mapping, (inputs, output, reference), _NAMES)
        run = schemas.Run(
            id=id, name="run", run_type="chain", start_time=now, end_time=now, trace_id=id,
            dotted_order=f"{now:%Y%m%dT%H%M%S%f}Z{id}", inputs=given or {}, outputs=shown,
        )  # fmt: skip
        example = schemas.Example(id=uuid4(), inputs=given, outputs=right, created_at=now)
        with run_helpers.tracing_context(enabled=False):
            found: Any = await call(evaluate, run, example)
        results = found["results"] if isinstance(found, Mapping) else [found]
        return [(one.key, one.score if one.score is not None else one.value, one.comment or "")
                for one in results]  # fmt: skip

    return _EachRun(ask, _name_of(evaluator, key), key, outputs)


def from_langfuse(
    evaluator: Callable[..., Any], key: str | None = None, *, outputs: Outputs | None = None
) -> GroupEvaluator:
    """The reward that an evaluator of Langfuse's ``run_experiment`` gives.

    Example::

        def correct(*, input, output, expected_output, **_):
            return Evaluation(name="correct", value=output == expected_output)

        Trainer(model, evaluator=from_langfuse(correct, outputs=lambda run: answer_of(run)))

    Args:
        evaluator: takes ``input``, ``output``, ``expected_output`` and ``metadata``.
        key: as for `from_langsmith`.
        outputs: what is shown as ``output``. None: what the graph returned.

    Raises:
        ConfigError: as `from_langsmith`.
    """
    judge = _called(evaluator)

    async def ask(inputs: Any, output: Any, reference: Any) -> _Results:
        given = {"input": inputs, "output": output, "expected_output": reference, "metadata": {}}
        found: Any = await call(partial(judge, **given))
        results = found if isinstance(found, list | tuple) else [found] if found else []
        return [(one.name, one.value, one.comment or "") for one in results]

    return _EachRun(ask, _name_of(evaluator, key), key, outputs)


def scenarios_of(examples: Iterable[Any]) -> list[dict[str, Any]]:
    """Examples of a LangSmith dataset, or items of a Langfuse dataset, as scenarios of a `Trainer`.

    A scenario has the ``id`` of the example, its ``input`` (what a graph is given) and its
    ``reference`` (LangSmith's ``outputs``, Langfuse's ``expected_output``), which the evaluators of
    this module are shown.

    Raises:
        ConfigError: something is neither.
    """
    found: list[dict[str, Any]] = []
    for one in examples:
        for given, right in (("inputs", "outputs"), ("input", "expected_output")):
            if hasattr(one, "id") and hasattr(one, given) and hasattr(one, right):
                reference = getattr(one, right)
                scenario = {"id": str(one.id), "input": getattr(one, given)}
                found.append(scenario | ({} if reference is None else {"reference": reference}))
                break
        else:
            raise ConfigError(
                f"got {one!r:.200}, expected an example of a LangSmith dataset "
                "(`client.list_examples(…)`) or an item of a Langfuse dataset "
                "(`langfuse.get_dataset(…).items`)"
            )
    return found


class _EachRun(GroupEvaluator):
    def __init__(self, ask: _Ask, name: str, wanted: str | None, outputs: Outputs | None) -> None:
        super().__init__(name)
        self._ask, self._wanted, self._outputs = ask, wanted, outputs
        self._warned = False

    async def ascore(self, group: TrajectoryGroup) -> list[Score | None]:
        inputs, reference = _scenario(group)
        if (why := group.metadata.get("scenario_left_out")) and not self._warned:
            self._warned = True
            log.warning(
                "The evaluator %r gets None as inputs and reference of group %s: its scenario was "
                "left out, since %s. Keep what is large elsewhere, and its name in the scenario.",
                *(self.key, group.id, why),
            )
        runs = (self._score(inputs, run, reference) for run in group.trajectories)
        return list(await asyncio.gather(*runs))

    async def _score(self, inputs: Any, run: Trajectory, reference: Any) -> Score | None:
        output = run.output if self._outputs is None else self._outputs(run)
        if not (results := await self._ask(inputs, output, reference)):
            return None
        names = [name for name, _, _ in results]
        wanted = self._wanted if self._wanted is not None or len(names) != 1 else names[0]
        if wanted not in names:
            raise ConfigError(
                f"the evaluator {self.key!r} gave results of the names {names}, expected one that "
                f"is the reward: got key={self._wanted!r}, pass key= one of these names"
            )
        values = {name: (_number(value, name), comment) for name, value, comment in results}
        value, comment = values.pop(wanted)
        parts = {name.replace("/", "."): one for name, (one, _) in values.items()}
        kept = {name: one for name, one in parts.items() if one is not None}
        return None if value is None else Score(value, comment, kept)


def _scenario(group: TrajectoryGroup) -> tuple[Any, Any]:
    """The inputs and the reference of a group: all but ``id`` and ``input``, or ``reference``."""
    scenario = group.metadata.get("scenario")
    if not isinstance(scenario, Mapping):
        return scenario, None
    rest = {name: value for name, value in scenario.items() if name not in ("id", "input")}
    return scenario.get("input", scenario), rest.get("reference", rest or None)


def _mapping(value: Any, name: str) -> dict[str, Any] | None:
    """LangSmith's inputs and outputs are mappings: it puts others under one name."""
    if value is None:
        return None
    return dict(value) if isinstance(value, Mapping) else {name: value}


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        return float(value)
    raise ConfigError(
        f"got the value {value!r:.100} of {name!r}, expected a number or a boolean: write a "
        "function around the evaluator that turns it into one"
    )


def _called(evaluator: Any) -> Callable[..., Any]:
    if not callable(evaluator):
        raise ConfigError(f"got {evaluator!r:.200}, expected a function that evaluates a run")
    # Of an object, LangSmith does not see that its call is a coroutine.
    is_object = is_async(evaluator) and not inspect.iscoroutinefunction(evaluator)
    return evaluator.__call__ if is_object else evaluator


def _name_of(evaluator: Any, key: str | None) -> str:
    name = key or getattr(evaluator, "__name__", type(evaluator).__name__)
    return name.replace("/", ".")
