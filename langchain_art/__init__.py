"""Reinforcement learning for LangGraph agents.

The names below load on first use (PEP 562), so that importing the package, or only
`langchain_art.wire`, stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_art.async_client import AsyncArtClient
    from langchain_art.capturing import CaptureHandler, Run, capture
    from langchain_art.chat_models import ChatART
    from langchain_art.client import ArtClient
    from langchain_art.evaluators.ruler import RulerEvaluator, ruler_score_group
    from langchain_art.gathering import gather
    from langchain_art.training import Trainer
    from langchain_art.wire import TrainConfig, Trajectory, TrajectoryGroup, Turn

__version__ = "0.1.0"

_HOME = {
    "ArtClient": "client",
    "AsyncArtClient": "async_client",
    "CaptureHandler": "capturing",
    "ChatART": "chat_models",
    "RulerEvaluator": "evaluators.ruler",
    "Run": "capturing",
    "TrainConfig": "wire",
    "Trainer": "training",
    "Trajectory": "wire",
    "TrajectoryGroup": "wire",
    "Turn": "wire",
    "capture": "capturing",
    "gather": "gathering",
    "ruler_score_group": "evaluators.ruler",
}

__all__ = [
    "ArtClient",
    "AsyncArtClient",
    "CaptureHandler",
    "ChatART",
    "RulerEvaluator",
    "Run",
    "TrainConfig",
    "Trainer",
    "Trajectory",
    "TrajectoryGroup",
    "Turn",
    "capture",
    "gather",
    "ruler_score_group",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
