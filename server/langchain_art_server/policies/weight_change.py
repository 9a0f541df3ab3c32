"""A new version's weights against its parent's: finite, and no further away than a step can go.

AdamW without weight decay moves a weight by ``rate · m / (√v + ε)`` in an update, m and v being
means of its gradients and of their squares. Whatever the gradients were, ``|m| / √v`` is at most
``√Σ a²/b``, a and b being the weights of one gradient in either mean (Cauchy and Schwarz). That
grows with the number of updates to ``(1 - β1) / √((1 - β2) · (1 - β1²/β2))``: 2.35 at β = (0.9,
0.99), 2.53 at (0.6, 0.96), and at most 3.17 with any `TrainConfig.momentum` (at 0). So no gradient,
however large, moves the weights further than 3.17 · rate · updates in the root mean square. What is
further was made by no step: by a damaged optimizer state, by a fault of memory, or by another
program.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from langchain_art.errors import ArtError
from langchain_art_server.backends.models.adapter_files import WEIGHTS_FILE

#: Learning rates by which an update may move the weights. Above 3.17: the moments of 8-bit Adam are
#: rounded.
MOST_RATES = 3.5
#: Of a float32: half of it is what one update may be off by where it is written down.
_ROUNDING = 2.0**-23
_NOTHING = "Nothing was published."


def check_weights(parent: Path, child: Path, rate: float, updates: float) -> float:
    """Compare the weights of two adapters, one tensor at a time.

    Args:
        parent: folder of the version that the step started from.
        child: folder of the new one.
        rate: the step's learning rate.
        updates: how many updates the optimizer has taken.

    Returns:
        The root mean square, over all weights, of what they changed by.

    Raises:
        ArtError: a weight is not finite, the tensors are others than the parent's, or the change is
            above ``3.5 · rate · updates`` (and the rounding of the weights).
    """
    squares, before, count = 0.0, 0.0, 0
    try:
        with _opened(parent) as old, _opened(child) as new:
            names = sorted(new.keys())
            if names != sorted(old.keys()):
                odd = sorted({*names} ^ {*old.keys()})
                raise ArtError(
                    f"The learner saved other tensors than the parent has: {odd[:3]}. {_NOTHING}"
                )
            for name in names:
                was, now = (_flat(one.get_tensor(name)) for one in (old, new))
                if was.shape != now.shape:
                    raise ArtError(
                        f"The learner saved {name!r} with {len(now)} numbers, expected the "
                        f"parent's {len(was)}. {_NOTHING}"
                    )
                moved = now - was
                if not math.isfinite(square := float(moved @ moved)):
                    raise ArtError(
                        f"The new version's {name!r} holds numbers that are not finite; lower "
                        f"learning_rate (now {rate:g}). {_NOTHING}"
                    )
                squares, before, count = (
                    squares + square,
                    before + float(was @ was),
                    count + len(was),
                )
    except (OSError, SafetensorError) as error:
        raise ArtError(f"{WEIGHTS_FILE} cannot be read: {error}. {_NOTHING}") from error
    change = math.sqrt(squares / max(count, 1))
    most = MOST_RATES * rate * updates + _ROUNDING * updates * math.sqrt(before / max(count, 1))
    if change > most:
        raise ArtError(
            f"The new version's weights are {change:.3g} away from its parent's (root mean "
            f"square), expected at most {most:.3g}: AdamW moves them by no more than "
            f"{MOST_RATES:g} learning rates in an update, whatever the gradients (learning_rate "
            f"{rate:g}, {updates:g} updates). Its state on disk, or the machine's memory, may be "
            f"damaged. {_NOTHING}"
        )
    return change


def _opened(folder: Path) -> Any:
    return safe_open(folder / WEIGHTS_FILE, framework="np")


def _flat(values: np.ndarray) -> np.ndarray:
    return values.ravel().astype(np.float64)
