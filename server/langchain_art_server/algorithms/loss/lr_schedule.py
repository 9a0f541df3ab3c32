"""The learning rate as a pure function of the policy's version. No torch, no state."""

from __future__ import annotations

from langchain_art.errors import InvalidRequest
from langchain_art.wire import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of the optimizer step(s) that make version `step` of a policy.

    Piecewise linear in `step` through ``(0, 0)``, ``(warmup_steps, learning_rate)`` and
    ``(decay_steps, final_learning_rate * learning_rate)``, constant from there on. Without warm-up
    it starts at the peak, without `decay_steps` it stays there.

    Example: ``learning_rate=1e-3, warmup_steps=2, decay_steps=12, final_learning_rate=0.1``::

        step  1     2     7       12    13
        rate  5e-4  1e-3  5.5e-4  1e-4  1e-4

    Args:
        config: reads `learning_rate`, `warmup_steps`, `decay_steps`, `final_learning_rate`.
        step: 1-based number of the version that results.

    Raises:
        InvalidRequest: `step` is below 1.
    """
    if step < 1:
        raise InvalidRequest(f"got step={step}, expected 1 or more", param="step")
    peak, warmup, end = config.learning_rate, config.warmup_steps, config.decay_steps
    if step < warmup:
        return peak * (step / warmup)
    if end is None:
        return peak
    progress = min(1.0, (step - warmup) / (end - warmup))
    return peak * (1.0 + progress * (config.final_learning_rate - 1.0))
