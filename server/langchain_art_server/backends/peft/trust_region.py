"""The trust region of a step: how far its policy may be from its parent's. Child side only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

#: Where in the region a step ends that went beyond it, as a share of the bound: KL divergence is
#: only nearly quadratic in the weights.
_AIM = 0.9
#: Most times that a step is shortened; if it still is too long then, nothing of it is kept. From
#: the third time on at least by half: where the policy is near a collapse, divergence can fall
#: more slowly than the distance.
_MOST_CUTS, _HALF = 8, 0.5


class TrustRegion:
    """Bounds KL(π_old ‖ π) of a step, in nats per token.

    Further updates on the same runs end once the bound is passed, as PPO's implementations do with
    `target_kl` (Spinning Up, Stable-Baselines3). What went beyond is taken back along the straight
    line to the parent's weights: near them the divergence is quadratic in the distance, so that
    the step times ``√(bound / divergence)`` is on the bound (TRPO, arXiv 1502.05477, appendix C,
    which searches along that line, too).

    Args:
        parameters: what is trained; at the parent's values now.
        bound: largest divergence.
        changed: called whenever the parameters were changed, before anything is measured.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], bound: float, changed: Callable[[], None]
    ) -> None:
        self._parameters, self._bound, self._changed = list(parameters), bound, changed
        self._parents = [one.detach().clone() for one in self._parameters]

    @torch.no_grad()
    def shorten(self, moved: float, measure: Callable[[], float]) -> tuple[float, float]:
        """Shorten the step until it is within the bound.

        Args:
            moved: the divergence now.
            measure: computes it anew, for the parameters as they are.

        Returns:
            The divergence at the end, and which share of the step was kept.
        """
        kept = 1.0
        ends = [one.detach().clone() for one in self._parameters] if moved > self._bound else []
        for cut in range(_MOST_CUTS):
            if moved <= self._bound:
                return moved, kept
            share = math.sqrt(_AIM * self._bound / moved)
            kept *= min(share, _HALF) if cut > 1 else share
            self._go(kept, ends)
            moved = measure()
        if moved <= self._bound:
            return moved, kept
        self._go(0.0, ends)
        return 0.0, 0.0

    def _go(self, share: float, ends: list[torch.Tensor]) -> None:
        for one, parent, end in zip(self._parameters, self._parents, ends, strict=True):
            one.copy_(parent + share * (end - parent))
        self._changed()
