"""Tests of endurance: a slice of each by default, the whole in ``make soak``."""

from __future__ import annotations

import os

import pytest

SOAK = os.environ.get("ART_SOAK") == "1"
#: Marks what ``make soak`` runs.
soak = pytest.mark.soak


def count(part: int, whole: int) -> int:
    """How often: `part` in ``make test`` and ``make test-vllm``, `whole` in ``make soak``."""
    return whole if SOAK else part
