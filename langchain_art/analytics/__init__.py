"""Figures of runs: rates with intervals, actions, errors, tokens, cost, latency, comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_art._lazy_names import lazy_names

if TYPE_CHECKING:  # `lazy_names` reads these imports too
    from langchain_art.analytics.analysis import analyze as analyze
    from langchain_art.analytics.analysis import compare as compare
    from langchain_art.analytics.analysis import (
        ActionFigures as ActionFigures,
        Analysis as Analysis,
        ErrorPattern as ErrorPattern,
        VersionFigures as VersionFigures,
    )
    from langchain_art.analytics.report import analysis_plot as analysis_plot
    from langchain_art.statistics.intervals import Comparison as Comparison
    from langchain_art.statistics.costs import NodeFigures as NodeFigures
else:  # a type checker takes the names imported above `as` themselves
    __all__, __getattr__, __dir__ = lazy_names(__name__)
