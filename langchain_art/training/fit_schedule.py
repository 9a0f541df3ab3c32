"""The number of steps of a fit, when held-out scenarios are evaluated, and when it ends early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_art.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """The arguments of `Trainer.fit`, where each is documented.

    Raises:
        ConfigError: a number is out of range, or `stop_early` has less than two scenarios.
    """

    steps: int
    eval_scenarios: Sequence[Any] = ()
    eval_every: int | None = None
    eval_samples: int = 1
    stop_early: int | None = None

    def __post_init__(self) -> None:
        steps, eval_every, eval_samples = self.steps, self.eval_every, self.eval_samples
        if steps < 0 or (eval_every is not None and eval_every < 1) or eval_samples < 1:
            raise ConfigError(f"got {steps=}, {eval_every=}, {eval_samples=}, expected counts")
        stop_early, held_out = self.stop_early, len(self.eval_scenarios)
        if stop_early is not None and (stop_early < 1 or held_out < 2):
            raise ConfigError(
                f"got {stop_early=} with {held_out} eval_scenarios, expected a positive number of "
                "evaluations, and at least two scenarios"
            )

    def evaluates(self, step: int) -> bool:
        """True before the first step, after the last, and every `eval_every` steps."""
        every = self.eval_every or self.steps or 1
        return bool(self.eval_scenarios) and (step % every == 0 or step >= self.steps)
