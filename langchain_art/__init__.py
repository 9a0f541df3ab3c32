"""Reinforcement learning for LangGraph agents.

The names below load on first use (PEP 562), so that importing the package, or only
`langchain_art.wire`, stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from langchain_art._version import __version__

if TYPE_CHECKING:
    from langchain_art.chat_models.chat_art import ChatART
    from langchain_art.client.async_client import AsyncArtClient
    from langchain_art.client.sync_client import ArtClient
    from langchain_art.evaluators.ruler.evaluator import RulerEvaluator, ruler_score_group
    from langchain_art.rollout.gather import gather
    from langchain_art.tracing.handler import CaptureHandler, Run, capture
    from langchain_art.training.trainer import Trainer
    from langchain_art.wire import TrainConfig, Trajectory, TrajectoryGroup, Turn

_HOME = {
    "ArtClient": "client.sync_client",
    "AsyncArtClient": "client.async_client",
    "CaptureHandler": "tracing.handler",
    "ChatART": "chat_models",
    "RulerEvaluator": "evaluators.ruler.evaluator",
    "Run": "tracing.run",
    "TrainConfig": "wire",
    "Trainer": "training.trainer",
    "Trajectory": "wire",
    "TrajectoryGroup": "wire",
    "Turn": "wire",
    "capture": "tracing.handler",
    "gather": "rollout.gather",
    "ruler_score_group": "evaluators.ruler.evaluator",
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
    "__version__",
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
