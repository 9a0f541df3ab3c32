"""The learning rate as a pure function of the steps since the base. No torch, no state."""

from __future__ import annotations

from langchain_art.errors import ConfigError, InvalidRequest
from langchain_art.wire import LRSchedule, StepConfig


def learning_rate(peak: float, schedule: LRSchedule, step: int) -> float:
    """The learning rate of the optimizer step(s) of step `step` (from 1) of a fit.

    Piecewise linear in `step` through ``(0, 0)``, ``(warmup_steps, peak)`` and
    ``(decay_steps, final_fraction * peak)``, constant from there on. Without warm-up it starts at
    the peak, without `decay_steps` it stays there.

    Raises InvalidRequest: `step` is below 1.

    Example: ``peak=1e-3, warmup_steps=2, decay_steps=12, final_fraction=0.1``::

        step  1     2     7       12    13
        rate  5e-4  1e-3  5.5e-4  1e-4  1e-4

    `transformers.get_linear_schedule_with_warmup` is one step behind: its first step has the rate
    0, and changes nothing.
    """
    if step < 1:
        raise InvalidRequest(f"got step={step}, expected 1 or more", param="step")
    warmup, end = schedule.warmup_steps, schedule.decay_steps
    if step < warmup:
        return peak * (step / warmup)
    if end is None:
        return peak
    progress = min(1.0, (step - warmup) / (end - warmup))
    return peak * (1.0 + progress * (schedule.final_fraction - 1.0))


def rate_of_step(config: StepConfig, step: int) -> float:
    """The learning rate of a fit's step, from 1 on. Raises ConfigError: `config` has none."""
    if config.learning_rate is None:
        raise ConfigError(
            "got a step without a learning rate, expected the one that was chosen for the "
            "policy when the job was queued (wire.with_learning_rate)"
        )
    return learning_rate(config.learning_rate, config.schedule, step)
