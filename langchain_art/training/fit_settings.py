"""The settings of a fit."""

from __future__ import annotations

from dataclasses import dataclass, field

from langchain_art.evaluators.scoring import Evaluator
from langchain_art.wire import LoraConfig, TrainConfig


@dataclass(frozen=True)
class FitSettings:
    """The options of `Trainer`, where each is documented."""

    policies: tuple[str, ...]
    evaluator: Evaluator | None
    group_size: int
    groups_per_step: int
    concurrency: int
    config: TrainConfig
    seed: int
    lora: LoraConfig | None
    max_failed: float
    trainable: dict[str, bool] = field(default_factory=dict[str, bool])
    max_steps_ahead: int = 0
    dynamic_sampling_rounds: int = 0
