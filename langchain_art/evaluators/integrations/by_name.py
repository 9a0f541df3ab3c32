"""An evaluator as LangSmith, Langfuse or openevals calls it: the arguments' names tell who does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_art.errors import ConfigError
from langchain_art.evaluators.base import GroupEvaluator
from langchain_art.evaluators.integrations.langfuse import item_evaluator, run_evaluator
from langchain_art.evaluators.integrations.langsmith import comparative_evaluator, row_evaluator
from langchain_art.evaluators.integrations.openevals import openevals_evaluator

_OPENEVALS = ("inputs", "outputs", "reference_outputs")


def called_by_name(evaluator: GroupEvaluator, given: Mapping[str, Any]) -> Any:
    """Arguments that the calling library expects, from those of these names; None: not given.

    Raises:
        ConfigError: no library calls an evaluator with these.
    """
    if "item_results" in given:
        return run_evaluator(evaluator)(**given)
    if "output" in given:
        return item_evaluator(evaluator)(**given)
    shown = {name: given[name] for name in _OPENEVALS if name in given}
    if "runs" in given:
        return comparative_evaluator(evaluator)(given["runs"], given.get("example"))
    if "run" in given:
        return row_evaluator(evaluator)(*(shown.get(name) or {} for name in _OPENEVALS))
    if "outputs" in given:
        return openevals_evaluator(evaluator)(**shown)
    raise ConfigError(
        f"got a call of the evaluator {evaluator.key!r} with {sorted(given)}, expected a "
        "TrajectoryGroup, or what LangSmith, Langfuse or openevals call their evaluators with"
    )
