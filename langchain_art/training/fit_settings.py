"""How the steps of a fit are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from langchain_art.evaluators.scoring import Evaluator
from langchain_art.wire import LoraConfig, TrainConfig


@dataclass(frozen=True)
class Plan:
    """How steps are made; see `Trainer` for each field."""

    policies: tuple[str, ...]
    evaluator: Evaluator | None
    group_size: int
    groups_per_step: int
    concurrency: int
    config: TrainConfig
    seed: int
    lora: LoraConfig | None
    max_failed: float
    train: dict[str, bool] = field(default_factory=dict[str, bool])
    ahead: int = 0
    refill: int = 0
