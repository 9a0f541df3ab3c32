"""Tests of endurance: a part of each by default, the whole in ``make soak``."""

from __future__ import annotations

import os


def count(part: int, whole: int) -> int:
    """How often: `part` in ``make test`` and ``make test-vllm``, `whole` in ``make soak``."""
    return whole if os.environ.get("ART_SOAK") == "1" else part
