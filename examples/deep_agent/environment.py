"""Needles in haystacks of reasoning-gym: who does what, in 60 to 100 sentences?"""

from __future__ import annotations

from typing import Any

import reasoning_gym


def haystacks(seed: int, size: int) -> Any:
    """A dataset of reasoning-gym; its task ``n`` is that of the seed ``seed + n``."""
    sizes = {"min_num_statements": 60, "max_num_statements": 100}
    return reasoning_gym.create_dataset("needle_haystack", seed=seed, size=size, **sizes)
