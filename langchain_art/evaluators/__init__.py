"""Evaluators: Runnables that score the runs of a group relative to each other.

The names below load on first use (PEP 562), so that importing the package stays light. Adapters for
other tools (openevals, LangSmith, Langfuse, pytest) are modules of `evaluators.integrations`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_art.evaluators.base import GroupEvaluator, Score
    from langchain_art.evaluators.calibration import (
        Agreement,
        agreement,
        agreement_table,
        calibrate,
    )
    from langchain_art.evaluators.composites import (
        FallbackEvaluator,
        GateEvaluator,
        SumEvaluator,
        VoteEvaluator,
    )
    from langchain_art.evaluators.criteria import (
        WeightedCriteriaEvaluator,
        completeness,
        dict_similarity,
        efficiency,
        exact,
        satisfaction,
        string_similarity,
    )
    from langchain_art.evaluators.functions import FunctionEvaluator, as_evaluator, own_rewards
    from langchain_art.evaluators.integrations.convert import as_group
    from langchain_art.evaluators.ruler.evaluator import RulerEvaluator, ruler_score_group
    from langchain_art.evaluators.scoring import Evaluator, score_groups

__all__ = [
    "Agreement",
    "Evaluator",
    "FallbackEvaluator",
    "FunctionEvaluator",
    "GateEvaluator",
    "GroupEvaluator",
    "RulerEvaluator",
    "Score",
    "SumEvaluator",
    "VoteEvaluator",
    "WeightedCriteriaEvaluator",
    "agreement",
    "agreement_table",
    "as_evaluator",
    "as_group",
    "calibrate",
    "completeness",
    "dict_similarity",
    "efficiency",
    "exact",
    "own_rewards",
    "ruler_score_group",
    "satisfaction",
    "score_groups",
    "string_similarity",
]
_NAMES = {
    "base": ("GroupEvaluator", "Score"),
    "calibration": ("Agreement", "agreement", "agreement_table", "calibrate"),
    "composites": ("FallbackEvaluator", "GateEvaluator", "SumEvaluator", "VoteEvaluator"),
    "criteria": (
        "WeightedCriteriaEvaluator",
        "completeness",
        "dict_similarity",
        "efficiency",
        "exact",
        "satisfaction",
        "string_similarity",
    ),
    "functions": ("FunctionEvaluator", "as_evaluator", "own_rewards"),
    "integrations.convert": ("as_group",),
    "ruler.evaluator": ("RulerEvaluator", "ruler_score_group"),
    "scoring": ("Evaluator", "score_groups"),
}
_HOME = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
