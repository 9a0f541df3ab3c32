"""The interval of a mean over five seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

#: 97.5 % quantile of Student's t with four degrees of freedom (five seeds).
T_FOUR = 2.776


def ci95_of_five(values: Sequence[float]) -> float:
    """Half width of the 95 % interval of the mean of five values, ``t_4 · s/√5``.

    Raises:
        ValueError: there are not five.
    """
    if len(values) != 5:
        raise ValueError(f"got {len(values)} values, expected five: the quantile is for five seeds")
    return T_FOUR * statistics.stdev(values) / 5**0.5
