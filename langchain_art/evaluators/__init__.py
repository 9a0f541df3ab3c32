"""Evaluators: Runnables that score the runs of a group relative to each other.

The names below load on first use (PEP 562), so that importing the package stays light. Adapters for
other tools (openevals, LangSmith, Langfuse, pytest) are modules of `evaluators.integrations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_art._lazy_names import lazy_names

if TYPE_CHECKING:  # `lazy_names` reads these imports too
    from langchain_art.evaluators.base import (
        FunctionEvaluator as FunctionEvaluator,
        GroupEvaluator as GroupEvaluator,
        Score as Score,
        as_evaluator as as_evaluator,
        own_rewards as own_rewards,
    )
    from langchain_art.evaluators.calibration import (
        Agreement as Agreement,
        agreement as agreement,
        agreement_table as agreement_table,
        calibrate as calibrate,
    )
    from langchain_art.evaluators.composites import (
        FallbackEvaluator as FallbackEvaluator,
        GateEvaluator as GateEvaluator,
        SumEvaluator as SumEvaluator,
        VoteEvaluator as VoteEvaluator,
    )
    from langchain_art.evaluators.criteria import (
        WeightedCriteriaEvaluator as WeightedCriteriaEvaluator,
        completeness as completeness,
        dict_similarity as dict_similarity,
        efficiency as efficiency,
        exact as exact,
        satisfaction as satisfaction,
        string_similarity as string_similarity,
    )
    from langchain_art.evaluators.integrations.convert import as_group as as_group
    from langchain_art.evaluators.ruler.evaluator import (
        RulerEvaluator as RulerEvaluator,
        ruler_score_group as ruler_score_group,
    )
    from langchain_art.evaluators.scoring import (
        Evaluator as Evaluator,
        score_groups as score_groups,
    )
else:  # a type checker takes the names imported above `as` themselves
    __all__, __getattr__, __dir__ = lazy_names(__name__)
